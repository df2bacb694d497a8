"""Figures of `python -m qerl_lab.bench`, and the ratios that they and the tables show. The caller closes a figure."""

import textwrap
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_lab.config.schema import DENSE_FORMAT
from qerl_lab.record.metrics import PHASES
from qerl_lab.report import palette, reference
from qerl_lab.report.palette import format_tick

Result = dict[str, Any]
# Arms of other libraries, drawn dashed or hatched in the color of their weight format.
OTHER_LIBRARIES = {f"{DENSE_FORMAT}_peft": DENSE_FORMAT, "bitsandbytes": "nf4", "qlora": "nf4"}
COLORS = palette.FORMATS | {arm: palette.FORMATS[name] for arm, name in OTHER_LIBRARIES.items()}
CALLED = {"bitsandbytes": "NF4, bitsandbytes", "qlora": "QLoRA\n(PEFT)", "bf16_peft": "BF16\n(PEFT)"}
BASES = {"bf16": "BF16", "qlora": "QLoRA"}  # baseline names up to the underscore, and their names in tables
LAYER = "whole layer"
AND_ADAPTER = "_and_adapter"  # suffix of a product that is timed together with the adapter
SMALL_LETTERS = 15  # characters per inch at fontsize 8
VISIBLE = 0.002  # share of the longest bar; shorter parts would show only in the legend


def gpu_of(result: Result) -> str:
    """Name the GPU of a result."""
    gpus = result["environment"]["gpus"]
    return gpus[0]["name"] if gpus else "no GPU"


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


def product_ratios(result: Result) -> pd.DataFrame:
    """Return a row per model, layer, tokens and arm: `ms`, `eager_ms`, and `ms` as ratios `of_bf16`, `of_bitsandbytes`.

    The layer `LAYER` ("whole layer") is the sum over the seven Linears of a decoder layer.
    """
    rows = pd.DataFrame(result["products"])
    key = ["model", "tokens", "arm"]
    total = rows.assign(ms=rows["ms"] * rows["count"], eager_ms=rows["eager_ms"] * rows["count"])
    total = total.groupby(key, as_index=False, sort=False)[["ms", "eager_ms"]].sum().assign(layer=LAYER)
    rows = pd.concat([rows, total])[["model", "layer", "tokens", "arm", "ms", "eager_ms"]]
    of_arm = rows.set_index(["model", "layer", "tokens", "arm"])["ms"].unstack("arm")
    for base in ("bf16", "bitsandbytes"):
        at = pd.MultiIndex.from_frame(rows[["model", "layer", "tokens"]])
        rows[f"of_{base}"] = rows["ms"].to_numpy() / of_arm[base].reindex(at).to_numpy()
    return rows.reset_index(drop=True)


def decode_times(result: Result) -> pd.DataFrame:
    """Return microseconds by (layer, rows) and arm; the layer `LAYER` is the sum of the four products."""
    rows = pd.DataFrame(result["decode"])
    total = rows.groupby(["rows", "arm"], as_index=False, sort=False)["us"].sum().assign(layer=LAYER)
    rows = pd.concat([rows, total])
    return rows.pivot_table(index=["layer", "rows"], columns="arm", values="us", sort=False)


def step_ratios(result: Result) -> pd.DataFrame:
    """Return the rows of the train step, with `tokens_per_second` also as a ratio to the BF16 and the QLoRA arm."""
    rows = pd.DataFrame(result["steps"])
    for base in ("bf16", "qlora"):
        own = rows[(rows["arm"] == base) & (rows["loss"] == "chunked")].set_index("micro_batch_tokens")
        rows[f"of_{base}"] = rows["tokens_per_second"] / rows["micro_batch_tokens"].map(own["tokens_per_second"])
    return rows


def _panels(count: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, count, figsize=(width, height), layout="constrained", squeeze=False, **shared)
    return figure, list(axes.flat)


def _dress(axis: Axes, title: str, label: str, x: Any = None) -> None:
    """Style a panel: zero baseline, grid, no frame. `x` are the ticks of an axis in powers of two."""
    if x is not None:
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(set(x)), [f"{value:,}" for value in sorted(set(x))])
    axis.set(title=title, xlabel=label)
    axis.set_ylim(bottom=0, top=1.12 * axis.get_ylim()[1])
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(format_tick)
    axis.grid(alpha=0.25, axis="y")
    axis.spines[["top", "right"]].set_visible(False)


def _draw_linear(result: Result) -> Figure:
    shown = product_ratios(result)
    shown = shown[(shown["layer"] == LAYER) & (shown["arm"] != "bf16")]
    models = list(shown["model"].unique())
    figure, axes = _panels(len(models), 5.2 * len(models), 3.8, sharey=True)
    for axis, model in zip(axes, models, strict=True):
        for arm, rows in shown[shown["model"] == model].groupby("arm", sort=False):
            line = "o--" if arm in OTHER_LIBRARIES else "o-"
            label = CALLED.get(str(arm), str(arm).upper())
            axis.plot(rows["tokens"], rows["of_bf16"], line, color=COLORS[str(arm)], label=label, lw=1.6, ms=4)
        axis.axhline(1, color=COLORS["bf16"], lw=1, ls="--")
        _dress(axis, f"{model}, seven Linears of a layer", "tokens", rows["tokens"])
    axes[0].set_ylabel("time, BF16 = 1")
    axes[0].legend(frameon=False)
    figure.suptitle(f"Forward + input gradient of packed Linears, {gpu_of(result)}")
    return figure


def _draw_decode(result: Result) -> Figure:
    times = decode_times(result)
    layers, bases = list(times.index.unique("layer")), [arm for arm in times if not arm.endswith(AND_ADAPTER)]
    figure, axes = _panels(len(layers), 3.2 * len(layers), 3.8)
    for axis, layer in zip(axes, layers, strict=True):
        for arm, us in times.loc[layer].items():
            base = arm.removesuffix(AND_ADAPTER)
            style = "--" if base != arm else ":" if arm.startswith("adapter") else "-"
            # A product that is no format, such as the adapter alone, has an unused color.
            shade = palette.FORMATS.get(base, palette.OTHERS[bases.index(base) % len(palette.OTHERS)])
            axis.plot(us.index, us, "o" + style, color=shade, label=arm, lw=1.4, ms=3)
        _dress(axis, layer, "rows", us.index)
    axes[0].set_ylabel("microseconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"Linears of decoding, {result['options']['model']}, {gpu_of(result)}")
    return figure


def _draw_train_steps(result: Result) -> Figure:
    rows = pd.DataFrame(result["steps"])
    rows = rows[rows["loss"] == "chunked"]
    sizes = sorted(rows["micro_batch_tokens"].unique(), reverse=True)
    width = max(6.5, 4.6 * len(sizes))  # makes room for the title
    figure, axes = plt.subplots(2, len(sizes), figsize=(width, 5.2), layout="constrained", squeeze=False)
    for column, size in enumerate(sizes):
        shown = rows[rows["micro_batch_tokens"] == size]
        names = [CALLED.get(arm, arm.upper()) for arm in shown["arm"]]
        for axis, value, label in (
            (axes[0, column], "tokens_per_second", "tokens/s"),
            (axes[1, column], "peak_gb", "peak GB"),
        ):
            bars = axis.bar(
                names, shown[value], color=[COLORS[arm] for arm in shown["arm"]],
                hatch=["///" if arm in OTHER_LIBRARIES else "" for arm in shown["arm"]], edgecolor="white", lw=0,
            )  # fmt: skip
            axis.set_xlim(-1 if len(shown) < 3 else None, 2 if len(shown) < 3 else None)  # keeps few bars narrow
            axis.bar_label(bars, fmt="{:,.0f}" if value == "tokens_per_second" else "{:.1f}", fontsize=8)
            _dress(axis, f"micro-batches of {size:,} tokens" if axis is axes[0, column] else "", "")
            axis.set_ylabel(label if column == 0 else "")
    about = result["options"]
    figure.suptitle(f"LoRA training step, {about['model']}, rank {about['rank']}, {gpu_of(result)}")
    return figure


def _draw_rollouts(result: Result) -> Figure:
    """Draw tokens/s by batch and, where measured, ratios to stock BF16 and ratios by rank beside the paper's."""
    rows, about = ratios(result, ("rank", "batch")), result["options"]
    others = rows[~rows["arm"].str.startswith("bf16_")]  # a baseline's ratio to itself is 1
    has_base, base = others["of_bf16"].notna().any(), _base_of_ranks(rows)
    panels = 1 + has_base + (base is not None)
    width, height = max(8.5, 5.2 * panels), 4.0 + 0.18 * rows["arm"].nunique()
    figure, axes = _panels(panels, width, height)
    shown = rows[rows["rank"] == rows["rank"].iloc[0]]
    _draw_arms(axes[0], shown, "batch", "tokens_per_second", f"rank {shown['rank'].iloc[0]}", "completions at once")
    axes[0].set_ylabel("tokens/s")
    handles, arms = axes[0].get_legend_handles_labels()
    names = [_in_lines(arm, width - 0.6) for arm in arms]
    figure.legend(handles, names, loc="outside lower left", frameon=False, fontsize=8, handlelength=3.2)
    if has_base:
        _draw_arms(axes[1], shown, "batch", "of_bf16", "of stock vLLM, BF16 LoRA", "completions at once")
    if base is not None:
        of_batch = rows[rows["batch"] == rows["batch"].min()]
        title = f"of stock vLLM, {BASES[base]}, batch {of_batch['batch'].iloc[0]}"
        _draw_arms(axes[-1], of_batch, "rank", f"of_{base}", title, "rank")
        if printed := reference.ratio_by_rank(about["model"], {"qlora": "nf4", "bf16": "bf16"}[base]):
            papers = axes[-1].plot([*printed], [*printed.values()], "k:", lw=1.2, label="paper, Figure 11, batch 1")
            axes[-1].legend(handles=papers, frameon=False, fontsize=8, loc="lower left")
    asked = f"prompt {about['prompt']:,}, {about['new']:,} new tokens"
    figure.suptitle(f"Rollouts, {about['model']}, {asked}, {gpu_of(result)}")
    return figure


def _base_of_ranks(rows: pd.DataFrame) -> str | None:
    """Choose the baseline of the panel of ranks: QLoRA, else BF16; None for a single rank and without a baseline."""
    measured = [name for name in ("qlora", "bf16") if rows[f"of_{name}"].notna().any()]
    return measured[0] if measured and rows["rank"].nunique() > 1 else None


def _draw_arms(axis: Axes, rows: pd.DataFrame, x: str, y: str, title: str, label: str) -> None:
    """Draw a line per arm in its format's color, dashed for a baseline.

    Further arms of one format get other markers and line styles, since equally fast arms overlap.
    """
    marks: dict[tuple[str, bool], int] = {}
    for arm, own in rows.groupby("arm", sort=False):
        kind = (own["format"].iloc[0], bool(own["baseline"].iloc[0]))
        number = marks[kind] = marks.get(kind, -1) + 1
        mark, style = "os^dv"[number % 5], "--" if kind[1] else ("-", ":", "-.")[number % 3]
        axis.plot(own[x], own[y], f"{mark}{style}", color=COLORS[kind[0]], label=arm, lw=1.6, ms=4)
    _dress(axis, title, label, rows[x])


def _in_lines(arm: str, inches: float) -> str:
    """Wrap the name of an arm to `inches`; with many keys it is wider than a figure."""
    return textwrap.fill(arm, int(SMALL_LETTERS * inches), break_on_hyphens=False)


def _draw_steps(result: Result) -> Figure:
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
    for place, arm, end in zip(at, rows["arm"], rows["step_seconds"], strict=True):
        axis.annotate(f"{end:.1f}", (end, place), (3, 0), textcoords="offset points", fontsize=8, va="center")
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


DRAWN = {
    "linear": _draw_linear, "decode": _draw_decode, "train_step": _draw_train_steps, "rollout": _draw_rollouts,
    "step": _draw_steps,
}  # fmt: skip
