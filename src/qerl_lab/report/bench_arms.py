"""Tables and figures of `python -m qerl_lab.bench rollout` and `step`, in which each arm is a process that may die."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_lab.record.metrics import PHASES
from qerl_lab.report.bench import COLORS, Result, dress, gpu_of
from qerl_lab.report.curves import png
from qerl_lab.report.paper import STEP_NEW, STEP_SECONDS, ratio_by_rank

BASES = {"bf16": "BF16", "qlora": "QLoRA"}  # baseline names up to the underscore, and their names in tables
# Arms that differ in one of these settings are not comparable, so `notes` warns.
SETTINGS = (
    "gpus", "max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefix_caching", "async_scheduling", "eager",
    "cuda_graphs", "dtype", "model_runner",
)  # fmt: skip
CLOCKS_APART = 0.03
SMALL_LETTERS = 15  # characters per inch at fontsize 8
KERNELS = 12  # most kernels per token that the table lists
VISIBLE = 0.002  # share of the longest bar; shorter parts would show only in the legend


def table(result: Result) -> str:
    """Format the numbers with ratios, the arms that died, and notes on what makes the comparison doubtful."""
    rows = pd.DataFrame(alive(result))
    parts = [] if rows.empty else [_rollout_table(result) if result["benchmark"] == "rollout" else _step_table(result)]
    parts += [f"{row['arm']}, rank {row['rank']}: died. {row['died']}" for row in result["rows"] if "died" in row]
    return "\n".join([*parts, *(f"note: {note}" for note in notes(alive(result)))])


def draw(result: Result, path: Path) -> None:
    """Draw the arms that lived; draw nothing if all died."""
    if not alive(result):
        return
    path.write_bytes(png(figure_of(result)))


def figure_of(result: Result) -> Figure:
    """Draw a result in which at least one arm lived; the caller closes the figure."""
    return _draw_rollouts(result) if result["benchmark"] == "rollout" else _draw_steps(result)


def alive(result: Result) -> list[dict[str, Any]]:
    """Return the rows of arms that did not die."""
    return [row for row in result["rows"] if "died" not in row]


def ratios(result: Result, key: tuple[str, ...]) -> pd.DataFrame:
    """Return the measured rows with `of_bf16` and `of_qlora`: tokens/s over that baseline's at an equal `key`."""
    rows = pd.DataFrame(alive(result))
    at = pd.MultiIndex.from_frame(rows[list(key)])
    for base in BASES:
        own = rows[rows["baseline"] & rows["arm"].str.startswith(f"{base}_")].drop_duplicates(list(key))
        speed = own.set_index(list(key))["tokens_per_second"].reindex(at)
        rows[f"of_{base}"] = rows["tokens_per_second"].to_numpy() / speed.to_numpy()
    return rows


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


def _rollout_table(result: Result) -> str:
    rows = ratios(result, ("rank", "batch"))
    head = [
        "tokens/s",
        "least",
        "most",
        "of BF16",
        "of QLoRA",
        "token ms",
        "host",
        "sync ms",
        "start s",
        "weights",
        "KV",
        "used",
    ]
    lines = [f"{'rank':>7}{'batch':>7}" + "".join(f"{name:>10}" for name in head)]
    for arm, own in rows.groupby("arm", sort=False):
        lines.append(arm)  # on its own line, as it may be long
        for _, row in own.iterrows():
            numbers = [
                f"{row['tokens_per_second']:,.0f}", f"{row['tokens_per_second_min']:,.0f}",
                f"{row['tokens_per_second_max']:,.0f}", f"{row['of_bf16']:.2f}", f"{row['of_qlora']:.2f}",
                f"{row['decode_ms']:.2f}", _told(row.get("host_share"), ".0%"), f"{row['sync_ms']:.1f}",
                f"{row['start_seconds']:.0f}",
                *(_told(row[name], ".1f") for name in ("weights_gib", "kv_gib", "used_gib")),
            ]  # fmt: skip
            lines.append(f"{row['rank']:7}{row['batch']:7}" + _cells(numbers))
    lines += ["weights, KV, used: GiB on the GPU"]
    if any(row.get("host_share") is not None for row in alive(result)):
        lines += ["host: share of a call in which its thread is busy; near 100% the host limits the speed, not the GPU"]
    return "\n".join([*lines, *_rank_lines(rows), *_kernel_lines(alive(result))])


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
            beside = f"{_beside(row, 'bf16', 'bf16')}; {_beside(row, 'qlora', 'nf4')}"
            speed = f"{row['tokens_per_second']:,.0f}, {row['tokens_per_second'] / first:.3f}"
            lines.append(f"  {arm}, batch {batch}, rank {row['rank']}: {speed}; {beside}")
    return lines


def _beside(row: Mapping[str, Any], base: str, papers: str) -> str:
    printed = ratio_by_rank(row["model"], papers).get(row["rank"])
    said = f" ({printed:.2f})" if printed and row["format"] == "nvfp4" else ""
    return f"{row[f'of_{base}']:.2f} of {BASES[base]}{said}".replace("nan", "-")


def _step_table(result: Result) -> str:
    rows = ratios(result, ("rank",))
    head = ["seconds", "tokens/s", "of BF16", "of QLoRA", *PHASES, "policy", "weights", "KV", "peak", "used"]
    lines = ["".join(f"{name:>10}" for name in head)]
    for _, row in rows.iterrows():
        numbers = [
            f"{row['step_seconds']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{row['of_bf16']:.2f}",
            f"{row['of_qlora']:.2f}", *(f"{row.get(f'{phase}_seconds', float('nan')):.2f}" for phase in PHASES),
            *(_told(row.get(name), ".1f") for name in ("policy_gib", "weights_gib", "kv_gib", "peak_gib", "used_gib")),
        ]  # fmt: skip
        lines += [row["arm"], _cells(numbers)]  # on its own line, as the arm may be long
    lines.append(f"{', '.join(PHASES)}: seconds. policy, weights, KV, peak, used: GiB on the GPU")
    return "\n".join([*lines, *_papers_step(result["options"])])


def _papers_step(asked: Mapping[str, Any]) -> list[str]:
    """Quote the paper's step time if it measured a step of as many completions and tokens."""
    completions = asked["groups"] * asked["group_size"]
    seconds = STEP_SECONDS.get(asked["model"], {}).get(completions)
    if seconds is None or asked["new"] != STEP_NEW:
        return []
    return [
        f"the paper (Table 8), NVFP4, batch {completions}, at most {STEP_NEW:,} new tokens, H100: {seconds} s; its "
        "completions end by themselves"
    ]


def _cells(numbers: list[str]) -> str:
    return "".join(f"{number.replace('nan', '-'):>10}" for number in numbers)


def _told(value: float | None, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form)


def _draw_rollouts(result: Result) -> plt.Figure:
    rows = ratios(result, ("rank", "batch"))
    others = rows[~rows["arm"].str.startswith("bf16_")]  # a baseline's ratio to itself is 1
    has_base, by_rank = others["of_bf16"].notna().any(), rows["rank"].nunique() > 1
    panels = 1 + has_base + by_rank
    width, height = max(8.5, 5.2 * panels), 4.0 + 0.18 * rows["arm"].nunique()
    figure, axes = plt.subplots(1, panels, figsize=(width, height), layout="constrained", squeeze=False)
    shown = rows[rows["rank"] == rows["rank"].iloc[0]]
    _lines(axes[0, 0], shown, "batch", "tokens_per_second")
    dress(axes[0, 0], f"rank {shown['rank'].iloc[0]}", "completions at once")
    axes[0, 0].set_ylabel("tokens/s")
    handles, arms = axes[0, 0].get_legend_handles_labels()
    names = [_in_lines(arm, width - 0.6) for arm in arms]
    figure.legend(handles, names, loc="outside lower left", frameon=False, fontsize=8, handlelength=3.2)
    if has_base:
        _lines(axes[0, 1], shown, "batch", "of_bf16")
        dress(axes[0, 1], "of stock vLLM, BF16 LoRA", "completions at once")
    if by_rank:
        _draw_ranks(axes[0, -1], rows[rows["batch"] == rows["batch"].min()], result["options"]["model"])
    about = result["options"]
    figure.suptitle(
        f"Rollouts, {about['model']}, prompt {about['prompt']:,}, {about['new']:,} new tokens, {gpu_of(result)}"
    )
    return figure


def _in_lines(arm: str, inches: float) -> str:
    """Wrap the name of an arm to `inches`; with many keys it is wider than a figure."""
    return textwrap.fill(arm, int(SMALL_LETTERS * inches), break_on_hyphens=False)


def _draw_ranks(axis: Axes, rows: pd.DataFrame, model: str) -> None:
    """Draw one batch by rank as ratios to QLoRA, else to BF16, beside the paper's.

    Without a baseline the ratios are to the smallest rank.
    """
    base = next((name for name in ("qlora", "bf16") if rows[f"of_{name}"].notna().any()), None)
    batch = rows["batch"].iloc[0]
    if base is None:
        smallest = rows.sort_values("rank").groupby("arm")["tokens_per_second"].transform("first")
        _lines(axis, rows.assign(of_smallest=rows["tokens_per_second"] / smallest), "rank", "of_smallest")
        dress(axis, f"of the smallest rank's tokens/s, batch {batch}", "rank")
        return
    _lines(axis, rows, "rank", f"of_{base}")
    if printed := ratio_by_rank(model, {"qlora": "nf4", "bf16": "bf16"}[base]):
        papers = axis.plot([*printed], [*printed.values()], "k:", lw=1.2, label="paper, Figure 11, batch 1")
        axis.legend(handles=papers, frameon=False, fontsize=8, loc="lower left")
    dress(axis, f"of stock vLLM, {BASES[base]}, batch {batch}", "rank")


def _lines(axis: Axes, rows: pd.DataFrame, x: str, y: str) -> None:
    """Draw a line per arm in its format's color, dashed for a baseline.

    Further arms of one format get other markers and line styles, since equally fast arms overlap.
    """
    marks: dict[tuple[str, bool], int] = {}
    for arm, own in rows.groupby("arm", sort=False):
        kind = (own["format"].iloc[0], bool(own["baseline"].iloc[0]))
        number = marks[kind] = marks.get(kind, -1) + 1
        mark, style = "os^dv"[number % 5], "--" if kind[1] else ("-", ":", "-.")[number % 3]
        axis.plot(own[x], own[y], f"{mark}{style}", color=COLORS[kind[0]], label=arm, lw=1.6, ms=4)
    axis.set_xscale("log", base=2)
    ticks = sorted(rows[x].unique())
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])


def _draw_steps(result: Result) -> plt.Figure:
    """Draw a horizontal bar per arm with its name above, as names may be long."""
    rows = ratios(result, ("rank",))
    width = 7.5
    figure, axis = plt.subplots(figsize=(width, 1.6 + 0.75 * len(rows)), layout="constrained")
    at, left, longest = range(len(rows)), [0.0] * len(rows), rows["step_seconds"].max()
    parts = rows.reindex(columns=[f"{phase}_seconds" for phase in PHASES]).fillna(0.0).set_axis(PHASES, axis=1)
    parts["other"] = (rows["step_seconds"] - parts.sum(axis=1)).clip(lower=0.0)
    for number, (part, seconds) in enumerate(parts.items()):
        if seconds.max() > VISIBLE * longest:
            axis.barh(at, seconds, left=left, label=part, height=0.45, color=f"C{number}" if part in PHASES else "0.8")
        left = [before + more for before, more in zip(left, seconds, strict=True)]
    for place, end in zip(at, rows["step_seconds"], strict=True):
        axis.annotate(f"{end:.1f}", (end, place), (3, 0), textcoords="offset points", fontsize=8, va="center")
    for place, arm in zip(at, rows["arm"], strict=True):
        axis.annotate(_in_lines(arm, width - 0.5), (0, place - 0.3), fontsize=7, va="bottom")
    axis.set(yticks=[], ylim=(len(rows) - 0.6, -0.8), xlim=(0, 1.1 * longest), xlabel="seconds of a step")
    axis.grid(alpha=0.25, axis="x")
    axis.set_axisbelow(True)
    axis.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(PHASES) + 1, frameon=False, fontsize=8)
    about = result["options"]
    ragged = f", mean_tokens={about['mean_tokens']:g}" if about.get("mean_tokens") else ""
    figure.suptitle(
        f"GRPO step, {about['model']}, {gpu_of(result)}\n{about['groups']} x {about['group_size']} completions of at "
        f"most {about['new']:,} tokens{ragged}"
    )
    return figure
