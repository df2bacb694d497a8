"""Tables and figures of the benchmarks `linear`, `decode`, `train_step` and `clock` (results/bench)."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_lab.config.schema import DENSE_FORMAT
from qerl_lab.report import palette
from qerl_lab.report.curves import png
from qerl_lab.report.numbers import tick

Result = dict[str, Any]
# Arms of other libraries, drawn dashed or hatched in the color of their weight format.
OTHER_LIBRARIES = {f"{DENSE_FORMAT}_peft": DENSE_FORMAT, "bitsandbytes": "nf4", "qlora": "nf4"}
COLORS = palette.FORMATS | {arm: palette.FORMATS[name] for arm, name in OTHER_LIBRARIES.items()}
LAYER = "whole layer"
AND_ADAPTER = "_and_adapter"  # suffix of a product that is timed together with the adapter


def table(result: Result) -> str:
    """Format the numbers of a result, mostly as ratios to a baseline."""
    if result["benchmark"] == "train_step":
        return _train_step_table(step_ratios(result))
    if result["benchmark"] == "decode":
        return _decode_table(decode_times(result))
    if result["benchmark"] == "clock":
        return clock_line(result)
    return f"{_dequantization_table(result)}\n\n{_products_table(product_ratios(result))}"


def clock_line(result: Result) -> str:
    """Format the cost of the clock's synchronization, from paired blocks of steps."""
    most = result.get("at_most_percent")  # older results lack it
    return (
        f"waiting costs {result['cost_percent']:+.2f}% [{result['low']:+.2f}, {result['high']:+.2f}] of a step, "
        f"{result['pairs']} of {result['options']['pairs']} pairs of {result['steps_a_block']} steps"
    ) + ("" if most is None else f"; at most {most:.2f}% by the time spent in waits")


def draw(result: Result, path: Path) -> None:
    path.write_bytes(png(figure_of(result)))


def figure_of(result: Result) -> Figure:
    """Draw a result; the caller closes the figure."""
    drawn = {"train_step": _draw_steps, "decode": _draw_decode, "linear": _draw_linear}
    return drawn[result["benchmark"]](result)


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


def _dequantization_table(result: Result) -> str:
    rows = pd.DataFrame(result["dequantization"])
    lines = ["unpacking to bfloat16: speed relative to copying as many bytes"]
    for (model, layer), shape in rows.groupby(["model", "layer"], sort=False):
        shares = "  ".join(f"{row['format']} {row['of_copy']:.2f}" for _, row in shape.iterrows())
        lines.append(f"  {model:12} {layer:14} {shares}")
    return "\n".join(lines)


def _products_table(ratios: pd.DataFrame) -> str:
    lines = ["forward + input gradient: kernel time relative to BF16 (relative to bitsandbytes)"]
    for (model, tokens, layer), shape in ratios.groupby(["model", "tokens", "layer"], sort=False):
        cells = [
            f"{row['arm']} {row['of_bf16']:.2f} ({row['of_bitsandbytes']:.2f})"
            for _, row in shape.iterrows() if row["arm"] != "bf16"
        ]  # fmt: skip
        lines.append(f"  {model:12} {tokens:5} tokens  {layer:14} {'  '.join(cells)}")
    return "\n".join(lines)


def _decode_table(times: pd.DataFrame) -> str:
    head = (
        "microseconds per call, weights from memory; adapter_*: adapter alone, *_and_adapter: product, then adapter, "
        "fp4_tiles: both\n"
    )
    return head + times.to_string(float_format=lambda us: f"{us:.1f}", na_rep="-")


def _train_step_table(ratios: pd.DataFrame) -> str:
    head = ("tokens/s", "of BF16", "of QLoRA", "peak GB", "base GB")
    lines = [f"{'arm':10}{'loss':>12}{'micro-batch':>12}" + "".join(f"{name:>9}" for name in head)]
    for _, row in ratios.iterrows():
        numbers = f"{row['tokens_per_second']:9,.0f}{row['of_bf16']:9.2f}{row['of_qlora']:9.2f}"
        memory = f"{row['peak_gb']:9.1f}{row['base_gb']:9.2f}"
        lines.append(f"{row['arm']:10}{row['loss']:>12}{row['micro_batch_tokens']:>12,}{numbers}{memory}")
    return "\n".join(lines).replace("nan", "  -")


def _draw_linear(result: Result) -> plt.Figure:
    ratios = product_ratios(result)
    ratios = ratios[(ratios["layer"] == LAYER) & (ratios["arm"] != "bf16")]
    models = list(ratios["model"].unique())
    figure, axes = plt.subplots(
        1, len(models), figsize=(5.2 * len(models), 3.8), layout="constrained", squeeze=False, sharey=True
    )
    for axis, model in zip(axes.flat, models, strict=True):
        for arm, rows in ratios[ratios["model"] == model].groupby("arm", sort=False):
            line = "o--" if arm in OTHER_LIBRARIES else "o-"
            axis.plot(rows["tokens"], rows["of_bf16"], line, color=COLORS[arm], label=_label(arm), lw=1.6, ms=4)
        axis.axhline(1, color=COLORS["bf16"], lw=1, ls="--")
        axis.set_xscale("log", base=2)
        axis.set_xticks(rows["tokens"], [f"{tokens:,}" for tokens in rows["tokens"]])
        dress(axis, f"{model}, seven Linears of a layer", "tokens")
    axes.flat[0].set_ylabel("time, BF16 = 1")
    axes.flat[0].legend(frameon=False)
    figure.suptitle(f"Forward + input gradient of packed Linears, {gpu_of(result)}")
    return figure


def _draw_decode(result: Result) -> plt.Figure:
    times = decode_times(result)
    layers, bases = list(times.index.unique("layer")), [arm for arm in times if not arm.endswith(AND_ADAPTER)]
    figure, axes = plt.subplots(1, len(layers), figsize=(3.2 * len(layers), 3.8), layout="constrained")
    for axis, layer in zip(axes, layers, strict=True):
        for arm, us in times.loc[layer].items():
            base = arm.removesuffix(AND_ADAPTER)
            style = "--" if base != arm else ":" if arm.startswith("adapter") else "-"
            axis.plot(us.index, us, "o" + style, color=_shade(base, bases), label=arm, lw=1.4, ms=3)
        axis.set_xscale("log", base=2)
        axis.set_xticks(us.index, [f"{rows:,}" for rows in us.index])
        dress(axis, layer, "rows")
    axes[0].set_ylabel("microseconds")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.suptitle(f"Linears of decoding, {result['options']['model']}, {gpu_of(result)}")
    return figure


def _shade(product: str, products: list[str]) -> str:
    """Return the color of a decode product: its format's, or an unused one for products that are no format."""
    return palette.FORMATS.get(product, palette.OTHERS[products.index(product) % len(palette.OTHERS)])


def _draw_steps(result: Result) -> plt.Figure:
    rows = pd.DataFrame(result["steps"])
    rows = rows[rows["loss"] == "chunked"]
    sizes = sorted(rows["micro_batch_tokens"].unique(), reverse=True)
    width = max(6.5, 4.6 * len(sizes))  # makes room for the title
    figure, axes = plt.subplots(2, len(sizes), figsize=(width, 5.2), layout="constrained", squeeze=False)
    for column, size in enumerate(sizes):
        shown = rows[rows["micro_batch_tokens"] == size]
        for axis, value, label in (
            (axes[0, column], "tokens_per_second", "tokens/s"),
            (axes[1, column], "peak_gb", "peak GB"),
        ):
            bars = axis.bar(
                [_label(arm) for arm in shown["arm"]], shown[value], color=[COLORS[a] for a in shown["arm"]],
                hatch=["///" if arm in OTHER_LIBRARIES else "" for arm in shown["arm"]], edgecolor="white", lw=0,
            )  # fmt: skip
            axis.set_xlim(-1 if len(shown) < 3 else None, 2 if len(shown) < 3 else None)  # keeps few bars narrow
            axis.bar_label(bars, fmt="{:,.0f}" if value == "tokens_per_second" else "{:.1f}", fontsize=8)
            dress(axis, f"micro-batches of {size:,} tokens" if axis is axes[0, column] else "", "")
            axis.set_ylabel(label if column == 0 else "")
    about = result["options"]
    figure.suptitle(f"LoRA training step, {about['model']}, rank {about['rank']}, {gpu_of(result)}")
    return figure


def _label(arm: str) -> str:
    return {"bitsandbytes": "NF4, bitsandbytes", "qlora": "QLoRA\n(PEFT)", "bf16_peft": "BF16\n(PEFT)"}.get(
        arm, arm.upper()
    )


def gpu_of(result: Result) -> str:
    """Name the GPU of a result for the figures."""
    gpus = result["environment"]["gpus"]
    return gpus[0]["name"] if gpus else "no GPU"


def dress(axis: Axes, title: str, label: str) -> None:
    """Style a panel of a bar chart: zero baseline, grid, no frame."""
    axis.set(title=title, xlabel=label)
    axis.set_ylim(bottom=0, top=1.12 * axis.get_ylim()[1])
    axis.set_axisbelow(True)
    axis.yaxis.set_major_formatter(tick)
    axis.grid(alpha=0.25, axis="y")
    axis.spines[["top", "right"]].set_visible(False)
