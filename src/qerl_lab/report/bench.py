"""Read results of `python -m qerl_lab.bench` as tables with ratios to a baseline, and format them as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd

from qerl_lab.config.option import parse_json
from qerl_lab.record.metrics import PHASES
from qerl_lab.report.runs import code_version
from qerl_lab.report.table import NONE
from qerl_lab.system.terminal import columns

Result = dict[str, Any]
OF_ARMS = ("rollout", "step")  # benchmarks that run each arm in its own process
LAYER = "whole layer"
AND_ADAPTER = "_and_adapter"  # suffix of a product that is timed together with the adapter
# Arms that differ in one of these settings are not comparable, so `notes` warns.
SETTINGS = (
    "gpus", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefix_caching", "async_scheduling", "eager",
    "cuda_graphs", "dtype", "model_runner",
)  # fmt: skip
CLOCKS_APART = 0.03
KERNELS = 12  # most kernels per token that the table lists
Columns = Sequence[tuple[str, str]]  # head of a column, and format of a row
OF_BASES = (("of BF16", "{of_bf16:.2f}"), ("of QLoRA", "{of_qlora:.2f}"))
SPEED, ARM = ("tokens/s", "{tokens_per_second:,.0f}"), ("arm", "{arm}")
ENGINE = (("weights", "{weights_gib:.1f}"), ("KV", "{kv_gib:.1f}"))
ROLLOUT = (
    ("rank", "{rank}"), ("batch", "{batch}"), SPEED, ("least", "{tokens_per_second_min:,.0f}"),
    ("most", "{tokens_per_second_max:,.0f}"), *OF_BASES, ("token ms", "{decode_ms:.2f}"), ("host", "{host_share:.0%}"),
    ("sync ms", "{sync_ms:.1f}"), ("start s", "{start_seconds:.0f}"), *ENGINE, ("used", "{used_gib:.1f}"), ARM,
)  # fmt: skip
STEP = (
    ("seconds", "{step_seconds:.2f}"), SPEED, *OF_BASES, *((phase, f"{{{phase}_seconds:.2f}}") for phase in PHASES),
    ("policy", "{policy_gib:.1f}"), *ENGINE, ("peak", "{peak_gib:.1f}"), ("used", "{used_gib:.1f}"), ARM,
)  # fmt: skip
TRAIN_STEP = (
    ARM, ("loss", "{loss}"), ("micro-batch", "{micro_batch_tokens:,.0f}"), SPEED, *OF_BASES,
    ("peak GB", "{peak_gb:.1f}"), ("base GB", "{base_gb:.2f}"),
)  # fmt: skip


def load(file: Path) -> Result:
    """Read the JSON file of a benchmark result. Raises ValueError or OSError for a file that is none."""
    result: Result = parse_json(file.read_bytes())
    return result


def gpu_of(result: Result) -> str:
    """Return the name of the GPU on which a benchmark ran."""
    gpus = result["environment"]["gpus"]
    return gpus[0]["name"] if gpus else "no GPU"


def code_of(result: Result) -> str:
    """Return the commit of the code that a benchmark measured."""
    about = result["environment"]
    return code_version(about["git_sha"], about["dirty"])


def origin(result: Result) -> str:
    """Describe when, on which GPU and by which code a result was measured."""
    about = result["environment"]
    versions = [f"{name} {about['packages'][name]}" for name in ("torch", "vllm") if about["packages"].get(name)]
    return ", ".join([about["time"][:10], gpu_of(result), *versions, f"commit {code_of(result)}"])


def measured_rows(result: Result) -> list[dict[str, Any]]:
    """Return the rows of a result, without the arms whose process died."""
    return [row for row in result["rows"] if "died" not in row]


def list_deaths(result: Result) -> list[str]:
    """List the arms of a result whose process died, each with the reason."""
    return [f"{row['arm']}, rank {row['rank']}, died: {row['died']}" for row in result["rows"] if "died" in row]


def with_ratios(
    rows: pd.DataFrame, value: str, key: Sequence[str], baselines: Mapping[str, pd.Series]
) -> pd.DataFrame:  # fmt: skip
    """Add a column `of_NAME` per baseline: `value` over the baseline's at an equal `key`, nan where it has none.

    `baselines` marks the rows of each.
    """
    for name, is_baseline in baselines.items():
        own = rows[is_baseline].drop_duplicates(key)[[*key, value]].rename(columns={value: f"of_{name}"})
        rows = rows.merge(own, on=[*key], how="left")
        rows[f"of_{name}"] = rows[value] / rows[f"of_{name}"]
    return rows


def speed_ratios(result: Result) -> pd.DataFrame:
    """Return the rows of a rollout or step benchmark, with ratios of tokens/s to stock arms (`of_bf16`, `of_qlora`)."""
    rows = pd.DataFrame(measured_rows(result))
    if rows.empty:
        return rows
    key = ["rank", "batch"] if result["benchmark"] == "rollout" else ["rank"]
    stock = {base: rows["baseline"] & rows["arm"].str.startswith(f"{base}_") for base in ("bf16", "qlora")}
    return with_ratios(rows, "tokens_per_second", key, stock)


def train_step_ratios(result: Result) -> pd.DataFrame:
    """Return the rows of a train_step benchmark, with ratios of tokens/s to bf16 and qlora at equal micro-batches."""
    rows = pd.DataFrame(result["steps"])
    bases = {base: (rows["arm"] == base) & (rows["loss"] == "chunked") for base in ("bf16", "qlora")}
    return with_ratios(rows, "tokens_per_second", ["micro_batch_tokens"], bases)


def product_ratios(result: Result) -> pd.DataFrame:
    """Return the `ms` of a linear benchmark by model, layer, tokens and arm, and its ratios to two baselines.

    The ratios are `of_bf16` and `of_bitsandbytes`. The layer `LAYER` ("whole layer") is the sum over the seven Linears
    of a decoder layer.
    """
    rows = pd.DataFrame(result["products"])
    total = rows.assign(ms=rows["ms"] * rows["count"])
    total = total.groupby(["model", "tokens", "arm"], as_index=False, sort=False)["ms"].sum().assign(layer=LAYER)
    rows = pd.concat([rows, total], ignore_index=True)[["model", "layer", "tokens", "arm", "ms"]]
    bases = {base: rows["arm"] == base for base in ("bf16", "bitsandbytes")}
    return with_ratios(rows, "ms", ["model", "layer", "tokens"], bases)


def decode_times(result: Result) -> pd.DataFrame:
    """Return the microseconds of a decode benchmark: a row per (layer, rows), a column per arm.

    The layer `LAYER` is the sum of the four products.
    """
    rows = pd.DataFrame(result["decode"])
    total = rows.groupby(["rows", "arm"], as_index=False, sort=False)["us"].sum().assign(layer=LAYER)
    rows = pd.concat([rows, total])
    return rows.pivot_table(index=["layer", "rows"], columns="arm", values="us", sort=False)


def text(result: Result) -> str:
    """Format a benchmark result for the terminal as a table, mostly with ratios to a baseline."""
    match result["benchmark"]:
        case "linear":
            copied = pd.DataFrame(result["dequantization"]).pivot_table(
                "of_copy", ["model", "layer"], "format", sort=False
            )
            products = product_ratios(result)
            products = products[products["arm"] != "bf16"]
            cells = products["of_bf16"].map("{:.2f}".format) + products["of_bitsandbytes"].map(" ({:.2f})".format)
            timed = products.assign(cell=cells).set_index(["model", "tokens", "layer", "arm"])["cell"]
            return "\n".join([
                "unpacking to bfloat16: speed relative to copying as many bytes", copied.to_string(float_format="%.2f"),
                "", "forward + input gradient: kernel time relative to BF16 (relative to bitsandbytes)",
                timed.unstack("arm", sort=False).to_string(),
            ])  # fmt: skip
        case "decode":
            head = "microseconds per call, weights from memory; adapter_*: adapter alone, *_and_adapter: product, then "
            times = decode_times(result).to_string(float_format=lambda us: f"{us:.1f}", na_rep=NONE)
            return f"{head}adapter, fp4_tiles: both\n{times}"
        case "train_step":
            return columns(table_rows(train_step_ratios(result), TRAIN_STEP))
        case "rollout" | "step":
            lines = [*_format_arms(result), *list_deaths(result)]
            return "\n".join([*lines, *(f"note: {note}" for note in notes(measured_rows(result)))])
    return ", ".join(f"{name} {value:g}" for name, value in result.items() if isinstance(value, int | float))


def _format_arms(result: Result) -> list[str]:
    """Format the rows of a rollout or step benchmark, their units and GPU kernels, as lines; none if every arm died."""
    rows = speed_ratios(result)
    if rows.empty:
        return []
    if result["benchmark"] == "step":
        units = f"{', '.join(PHASES)}: seconds. policy, weights, KV, peak, used: GiB on the GPU"
        return [columns(table_rows(rows, STEP)), units]
    lines = [columns(table_rows(rows, ROLLOUT)), "weights, KV, used: GiB on the GPU"]
    if "host_share" in rows and rows["host_share"].notna().any():
        lines.append(
            "host: share of a call in which its thread is busy; near 100% the host limits the speed, not the GPU"
        )
    profiled = [row for row in measured_rows(result) if row.get("kernels")]
    for n, row in enumerate(profiled):
        about = f"{row['arm']}, rank {row['rank']}, batch {row['batch']}: kernels run for {row['busy_us']:,.0f}"
        kernels = pd.DataFrame(row["kernels"])
        listed, others = kernels[:KERNELS].to_dict("records"), kernels[KERNELS:]
        if len(others):
            listed.append({"name": f"{len(others)} others", "us": others["us"].sum(), "calls": others["calls"].sum()})
        lines += [] if n else [""]
        lines.append(f"{about} microseconds of a token's {1e3 * row['decode_ms']:,.0f}")
        lines += [f"{kernel['us']:10,.0f} in {kernel['calls']:5,.0f} launches  {kernel['name']}" for kernel in listed]
    return lines


def notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the differences between rows that spoil a comparison of arms: vLLM settings and GPU clocks."""
    found = []
    for name in SETTINGS:
        held: dict[str, list[str]] = {}
        for row in rows:
            if name in row:
                held.setdefault(str(row[name]), []).append(row["arm"])
        if len(held) > 1:
            parts = (f"{value} in {', '.join(dict.fromkeys(arms))}" for value, arms in held.items())
            found.append(f"{name} differs: {'; '.join(parts)}")
    clocks = [row["sm_mhz"] for row in rows if row.get("sm_mhz")]
    if clocks and max(clocks) > (1 + CLOCKS_APART) * min(clocks):
        found.append(f"the GPU's clock was between {min(clocks):,.0f} and {max(clocks):,.0f} MHz (sm_mhz of each row)")
    return found


def table_rows(rows: pd.DataFrame, spec: Columns) -> list[list[str]]:
    """Format a data frame as cells below a head, a column per entry of `spec`; a dash for what was not measured."""
    names = {form: [name for _, name, _, _ in Formatter().parse(form) if name] for _, form in spec}
    cells = [
        [NONE if any(pd.isna(row.get(name)) for name in names[form]) else form.format_map(row) for _, form in spec]
        for row in rows.to_dict("records")
    ]
    return [[head for head, _ in spec], *cells]
