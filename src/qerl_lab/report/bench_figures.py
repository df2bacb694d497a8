"""Draw results of `python -m qerl_lab.bench`: rollouts as lines by batch and rank, times and memory as bars."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from qerl_lab.record.metrics import PHASES
from qerl_lab.report import bench, palette
from qerl_lab.report.bench import OTHER_LIBRARIES, Result, gpu_of
from qerl_lab.report.palette import add_legend_below, add_title, format_tick, png, styled
from qerl_lab.report.speed_tables import PAPER_PROMPT, paper_rollouts

BASES = {"qlora": "nf4", "bf16": "bf16"}  # names of baselines -> weight format of the baseline in the paper
PAPER = "paper, Figure 11, batch 1"
NOT_SPLIT = "not timed apart"
VISIBLE = 0.002  # share of the longest bar; shorter parts would show only in the legend


def figure(result: Result) -> Figure | None:
    """Draw a benchmark result; None if every arm died. The caller closes the figure."""
    rows = bench.measured(result)
    if rows.empty:
        return None
    draw_of = {"train_step": _draw_train_step_costs, "rollout": _draw_rollouts, "step": _draw_step_times}
    with styled():
        return draw_of[result["benchmark"]](rows, result["options"], gpu_of(result))


def draw(result: Result, path: Path) -> None:
    """Draw a benchmark result to the PNG file `path`; write no file if every arm died."""
    if drawn := figure(result):
        path.write_bytes(png(drawn))


def _draw_rollouts(rows: pd.DataFrame, options: Mapping[str, Any], gpu: str) -> Figure:
    """Draw up to three panels of a rollout benchmark, with a line per arm.

    - tokens/s by batch, at the first LoRA rank of the result.
    - Ratios to stock BF16 by batch, if stock BF16 was measured.
    - Ratios to a stock arm by rank, at the smallest batch, if several ranks were measured. The paper's Figure 11 is
      added if the prompts have the paper's length.
    """
    formats = rows.drop_duplicates("arm").set_index("arm")["format"].to_dict()
    styles = palette.styles(formats) | {PAPER: {"color": "black", "linestyle": ":"}}
    rank, batch = rows["rank"].iloc[0], rows["batch"].min()

    def pivot_by_arm(chosen: pd.DataFrame, x: str, y: str) -> pd.DataFrame:
        """Return a table of the column `y`: a row per value of `x`, a column per arm."""
        lines = chosen.pivot(index=x, columns="arm", values=y)
        return lines[[arm for arm in formats if arm in lines]].dropna(axis=1, how="all")

    one_rank = rows[rows["rank"] == rank]
    panels = {(f"tokens/s, rank {rank}", "completions at once"): pivot_by_arm(one_rank, "batch", "tokens_per_second")}
    of_bf16 = pivot_by_arm(one_rank, "batch", "of_bf16")
    if any(not arm.startswith("bf16_") for arm in of_bf16):  # a baseline's ratio to itself is 1
        panels[(f"ratio to {rows['base_bf16'].iloc[0]}", "completions at once")] = of_bf16
    base = next((base for base in BASES if rows[f"of_{base}"].notna().any()), None)
    if base and rows["rank"].nunique() > 1:
        by_rank, papers = pivot_by_arm(rows[rows["batch"] == batch], "rank", f"of_{base}"), paper_rollouts()
        is_like_ours = (papers["model"] == options["model"]) & (options["prompt"] == PAPER_PROMPT)
        papers = papers[is_like_ours & (papers["batch"] == 1) & (papers["format"] == "nvfp4")]
        by_rank[PAPER] = papers.set_index("rank")[f"of_{BASES[base]}"]
        panels[(f"ratio to {rows[f'base_{base}'].iloc[0]}, batch {batch}", "rank")] = by_rank.dropna(axis=1, how="all")

    figure, axes = plt.subplots(1, len(panels), figsize=(max(7.5, 3.6 * len(panels)), 3.5), squeeze=False)
    for axis, ((title, x), lines) in zip(axes.flat, panels.items(), strict=True):
        for arm in lines:
            axis.plot(lines[arm].dropna(), label=arm, **styles[arm])
        axis.set_xscale("log", base=2)
        axis.set_xticks(lines.index, [f"{value:,}" for value in lines.index])
        axis.set(title=title, xlabel=x, ylim=(0, 1.12 * axis.get_ylim()[1]))
        axis.yaxis.set_major_formatter(format_tick)
    add_legend_below(figure)
    asked = f"prompt {options['prompt']:,}, {options['new']:,} new tokens"
    add_title(figure, f"Rollouts, {options['model']}, {asked}, {gpu}")
    return figure


def _draw_step_times(rows: pd.DataFrame, options: Mapping[str, Any], gpu: str) -> Figure:
    """Draw the seconds of a step: a bar per arm, split by phase, or grey if no phase was timed.

    Phases are scaled to add up to the step, because their medians do not.
    """
    rows = rows.set_index("arm")
    parts = rows.reindex(columns=[f"{phase}_seconds" for phase in PHASES]).set_axis(PHASES, axis=1)
    parts = parts.mul(rows["step_seconds"] / parts.sum(axis=1), axis=0).fillna(0.0)
    parts[NOT_SPLIT] = rows["step_seconds"] - parts.sum(axis=1)
    colors = {phase: {"color": f"C{number}"} for number, phase in enumerate(PHASES)} | {NOT_SPLIT: {"color": "0.8"}}
    ragged = ""
    if options.get("mean_tokens"):  # arms sample different lengths, so seconds alone compare unequal work
        ragged = f", mean_tokens={options['mean_tokens']:g}"
        parts.index = [f"{arm}: {tokens:,.0f} tokens" for arm, tokens in rows["tokens"].items()]
    asked = f"{options['groups']} x {options['group_size']} completions of at most {options['new']:,} tokens{ragged}"
    title = f"GRPO step, {options['model']}, {gpu}\n{asked}"
    return _draw_bar_panels({"seconds of a step": parts}, title, colors)


def _draw_train_step_costs(rows: pd.DataFrame, options: Mapping[str, Any], gpu: str) -> Figure:
    """Draw tokens/s and peak memory of training steps: a panel per quantity and micro-batch size, a bar per arm."""
    arms = rows["arm"].unique()
    panels = {
        f"{label},\nmicro-batches of {size:,}": same.set_index("arm")[[column]].reindex(arms)
        for column, label in (("tokens_per_second", "tokens/s"), ("peak_gb", "peak GB"))
        for size, same in rows.groupby("micro_batch_tokens", sort=False)
    }
    look = {
        "color": [palette.color(OTHER_LIBRARIES.get(arm, arm)) for arm in arms],
        "hatch": ["///" if arm in OTHER_LIBRARIES else "" for arm in arms],
        "edgecolor": "white",
    }
    title = f"LoRA training step, {options['model']}, rank {options['rank']}, {gpu}"
    return _draw_bar_panels(panels, title, {"tokens_per_second": look, "peak_gb": look})


def _draw_bar_panels(panels: Mapping[str, pd.DataFrame], title: str, looks: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw panels side by side, each with a horizontal bar per arm, stacked from parts and labeled with the total.

    `panels` maps x label -> table with a row per arm and a column per part, `looks` a part to arguments of `barh`.
    Panels of the same parts have one scale.
    """
    arms = [textwrap.fill(arm, 40, break_long_words=False) for arm in next(iter(panels.values())).index]
    size = max(7.5, 3.2 * len(panels)), 1.4 + 0.22 * sum(arm.count("\n") + 2 for arm in arms)
    figure, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    longest = dict[tuple[str, ...], float]()
    for parts in panels.values():
        longest[(*parts,)] = max(longest.get((*parts,), 0), parts.sum(axis=1).max())
    for axis, (label, parts) in zip(axes.flat, panels.items(), strict=True):
        total = parts.sum(axis=1)
        ends = parts.cumsum(axis=1)
        for part in parts:
            if parts[part].max() > VISIBLE * total.max():
                axis.barh(arms, parts[part], left=ends[part] - parts[part], height=0.6, label=part, **looks[part])
        for row, end in enumerate(total):
            text = ""
            if end:
                text = f"{end:,.0f}" if end >= 100 else f"{end:.1f}"
            axis.annotate(text, (end, row), (3, 0), textcoords="offset points", fontsize=8, va="center")
        axis.set(xlabel=label, xlim=(0, 1.18 * longest[(*parts,)]))
        axis.grid(visible=False, axis="y")
        axis.locator_params(axis="x", nbins=5)  # more labels run into those of the next panel
        axis.xaxis.set_major_formatter(format_tick)
    axes.flat[0].invert_yaxis()
    if len(parts.columns) > 1:
        add_legend_below(figure)
    add_title(figure, title)
    return figure
