"""Read results of `python -m qerl_lab.bench`, and format them as tables; bench_figures.py draws them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.config.spelling import shell_word
from qerl_lab.record.metrics import PHASES
from qerl_lab.report import bench_figures, reference
from qerl_lab.report.arms import version
from qerl_lab.report.bench_figures import (
    BASES,
    Result,
    alive,
    decode_times,
    gpu_of,
    product_ratios,
    ratios,
    step_ratios,
)
from qerl_lab.report.curves import png
from qerl_lab.system.terminal import columns

OF_ARMS = ("rollout", "step")  # benchmarks that run each arm in its own process
NO_RESULT = (ValueError, LookupError, TypeError, AttributeError)  # raised by reading an invalid or incomplete file
# Arms that differ in one of these settings are not comparable, so `notes` warns.
SETTINGS = (
    "gpus", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefix_caching", "async_scheduling", "eager",
    "cuda_graphs", "dtype", "model_runner",
)  # fmt: skip
CLOCKS_APART = 0.03
KERNELS = 12  # most kernels per token that the table lists
# Columns of the tables: head, name in a row, format.
OF_BASES = (("of BF16", "of_bf16", ".2f"), ("of QLoRA", "of_qlora", ".2f"))
GIBS = (("weights", "weights_gib", ".1f"), ("KV", "kv_gib", ".1f"))
SPEED, USED, ARM = ("tokens/s", "tokens_per_second", ",.0f"), ("used", "used_gib", ".1f"), ("arm", "arm", "")
ROLLOUT = (
    ("rank", "rank", ""), ("batch", "batch", ""), SPEED, ("least", "tokens_per_second_min", ",.0f"),
    ("most", "tokens_per_second_max", ",.0f"), *OF_BASES, ("token ms", "decode_ms", ".2f"),
    ("host", "host_share", ".0%"), ("sync ms", "sync_ms", ".1f"), ("start s", "start_seconds", ".0f"), *GIBS, USED, ARM,
)  # fmt: skip
STEP = (
    ("seconds", "step_seconds", ".2f"), SPEED, *OF_BASES, *((phase, f"{phase}_seconds", ".2f") for phase in PHASES),
    ("policy", "policy_gib", ".1f"), *GIBS, ("peak", "peak_gib", ".1f"), USED, ARM,
)  # fmt: skip
TRAIN_STEP = (
    ARM, ("loss", "loss", ""), ("micro-batch", "micro_batch_tokens", ",.0f"), SPEED, *OF_BASES,
    ("peak GB", "peak_gb", ".1f"), ("base GB", "base_gb", ".2f"),
)  # fmt: skip


def read(folder: Path) -> dict[str, Result]:
    """Read the results of a folder by file name. Raises ConfigError if there is none or a file is invalid."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        try:
            found[file.stem] = load(file)
        except NO_RESULT as error:
            raise ConfigError(f"{file} is no result of python -m qerl_lab.bench ({error!r}). Move it away.") from None
    if not found:
        out = shell_word("out", folder / "train_step")
        raise ConfigError(f"{folder} holds no result. Make one: python -m qerl_lab.bench train_step {out}.")
    return found


def load(file: Path) -> Result:
    """Read one result. Raises one of `NO_RESULT`, or OSError."""
    result: Result = parse_json(file.read_bytes())
    result["benchmark"], result["environment"]
    return result


def origin(result: Result) -> str:
    """Say when, on which GPU and by which code a result was measured."""
    about = result["environment"]
    versions = [f"{name} {about['packages'][name]}" for name in ("torch", "vllm") if about["packages"].get(name)]
    code = version(about["git_sha"], about["dirty"])
    return ", ".join([about["time"][:10], gpu_of(result), *versions, f"commit {code}"])


def figure(result: Result) -> Figure | None:
    """Draw a result; the caller closes the figure. None if there is nothing to draw, as where every arm died."""
    draw = bench_figures.DRAWN.get(result["benchmark"])
    return draw(result) if draw and (result["benchmark"] not in OF_ARMS or alive(result)) else None


def draw(result: Result, path: Path) -> None:
    """Write the figure as a PNG, if there is one."""
    if drawn := figure(result):
        path.write_bytes(png(drawn))


def text(result: Result) -> str:
    """Format a result as a table, mostly with ratios to a baseline."""
    match result["benchmark"]:
        case "linear":
            return _linear_tables(result)
        case "decode":
            head = "microseconds per call, weights from memory; adapter_*: adapter alone, *_and_adapter: product, then "
            times = decode_times(result).to_string(float_format=lambda us: f"{us:.1f}", na_rep="-")
            return f"{head}adapter, fp4_tiles: both\n{times}"
        case "train_step":
            return _table(step_ratios(result), TRAIN_STEP)
        case "rollout" | "step":
            lines = _rollout_lines if result["benchmark"] == "rollout" else _step_lines
            parts = lines(result) if alive(result) else []
            parts += [
                f"{row['arm']}, rank {row['rank']}: died. {row['died']}" for row in result["rows"] if "died" in row
            ]
            return "\n".join([*parts, *(f"note: {note}" for note in notes(alive(result)))])
    return ", ".join(f"{name} {value:g}" for name, value in result.items() if isinstance(value, int | float))


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Warn about differences other than the arm: vLLM settings and GPU clocks."""
    found = []
    for name in SETTINGS:
        held: dict[str, list[str]] = {}
        for row in rows:
            if name in row:
                held.setdefault(str(row[name]), []).append(row["arm"])
        if len(held) > 1:
            found.append(
                f"{name} differs: " + "; ".join(f"{v} in {', '.join(dict.fromkeys(a))}" for v, a in held.items())
            )
    clocks = [row["sm_mhz"] for row in rows if row.get("sm_mhz")]
    if clocks and max(clocks) > (1 + CLOCKS_APART) * min(clocks):
        found.append(f"the GPU's clock was between {min(clocks):,.0f} and {max(clocks):,.0f} MHz (sm_mhz of each row)")
    return found


def _linear_tables(result: Result) -> str:
    copied = pd.DataFrame(result["dequantization"]).pivot_table("of_copy", ["model", "layer"], "format", sort=False)
    products = product_ratios(result)
    products = products[products["arm"] != "bf16"]
    cells = products["of_bf16"].map("{:.2f}".format) + products["of_bitsandbytes"].map(" ({:.2f})".format)
    timed = (
        products.assign(cell=cells).set_index(["model", "tokens", "layer", "arm"])["cell"].unstack("arm", sort=False)
    )
    return "\n".join([
        "unpacking to bfloat16: speed relative to copying as many bytes", copied.to_string(float_format="%.2f"), "",
        "forward + input gradient: kernel time relative to BF16 (relative to bitsandbytes)", timed.to_string(),
    ])  # fmt: skip


def _table(rows: pd.DataFrame, spec: Sequence[tuple[str, str, str]]) -> str:
    """Format columns of a table, with a dash for what was not measured."""
    cells = [
        ["-" if pd.isna(row.get(name)) else format(row[name], form) for _, name, form in spec]
        for row in rows.to_dict("records")
    ]
    return columns([[head for head, _, _ in spec], *cells])


def _rollout_lines(result: Result) -> list[str]:
    rows = ratios(result, ("rank", "batch"))
    lines = [_table(rows, ROLLOUT), "weights, KV, used: GiB on the GPU"]
    if any(row.get("host_share") is not None for row in alive(result)):
        lines.append(
            "host: share of a call in which its thread is busy; near 100% the host limits the speed, not the GPU"
        )
    return [*lines, *_rank_lines(rows), *_kernel_lines(alive(result))]


def _step_lines(result: Result) -> list[str]:
    lines = [_table(ratios(result, ("rank",)), STEP)]
    lines.append(f"{', '.join(PHASES)}: seconds. policy, weights, KV, peak, used: GiB on the GPU")
    asked = result["options"]
    completions = asked["groups"] * asked["group_size"]
    printed = reference.step_speed(asked["model"], completions, "nvfp4")
    if printed.endswith("s/step") and asked["new"] == reference.MOST_TOKENS:
        lines.append(
            f"the paper (Table 8), NVFP4, batch {completions}, at most {asked['new']:,} new tokens, H100: "
            f"{printed.removesuffix('/step')}; its completions end by themselves"
        )
    return lines


def _kernel_lines(rows: list[dict[str, Any]]) -> list[str]:
    """List the kernels that take most of a token's time, where they were measured."""
    lines = []
    for row in rows:
        if kernels := row.get("kernels"):
            lines.append(
                f"{row['arm']}, rank {row['rank']}, batch {row['batch']}: kernels run for {row['busy_us']:,.0f} "
                f"microseconds of a token's {1e3 * row['decode_ms']:,.0f}"
            )
            named, others = kernels[:KERNELS], kernels[KERNELS:]
            rest = {"name": f"{len(others)} others"} | {key: sum(one[key] for one in others) for key in ("us", "calls")}
            for kernel in [*named, *([rest] if others else [])]:
                lines.append(f"{kernel['us']:10,.0f} in {kernel['calls']:5,.0f} launches  {kernel['name']}")
    return ["", *lines] if lines else []


def _rank_lines(rows: pd.DataFrame) -> list[str]:
    """List the cost of a larger rank for each arm, beside the paper's ratios; empty for a single rank."""
    if rows["rank"].nunique() < 2:
        return []
    lines = [
        "",
        "by rank: tokens/s, ratio to the smallest rank; to BF16 and QLoRA, in brackets the paper's NVFP4 (batch 1)",
    ]
    for (arm, batch), same in rows.sort_values("rank").groupby(["arm", "batch"], sort=False):
        first = same["tokens_per_second"].iloc[0]
        for _, row in same.iterrows():
            beside = []
            for base, papers in (("bf16", "bf16"), ("qlora", "nf4")):
                printed = reference.ratio_by_rank(row["model"], papers).get(row["rank"])
                said = f" ({printed:.2f})" if printed and row["format"] == "nvfp4" else ""
                beside.append(f"{row[f'of_{base}']:.2f} of {BASES[base]}{said}".replace("nan", "-"))
            speed = f"{row['tokens_per_second']:,.0f}, {row['tokens_per_second'] / first:.3f}"
            lines.append(f"  {arm}, batch {batch}, rank {row['rank']}: {speed}; {'; '.join(beside)}")
    return lines
