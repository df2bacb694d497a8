"""Figures of one run, of entropy by weight format, and of formats beside noise (evaluate/format_effects.py)."""

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_lab.record.metrics import METRICS
from qerl_lab.report import palette
from qerl_lab.report.palette import add_title, format_tick, png, styled

MARKS = "osD^v<>"
OVERLONG = "reward/overlong"
MOST_IN_ROW = 3  # names of lines side by side in the legend of a panel
ROW_CHARS, HANDLE_CHARS = 55, 10  # characters that fit beside each other in a panel; the line before a name takes 10
PANELS = (  # title, y label, (metric, label) for each line
    ("Reward", "reward", (("reward/mean", "total"), ("reward/answer", "answer"), ("reward/format", "format"))),
    ("Entropy", "nats per token", (("policy/entropy_nats", "policy"), ("sampler/entropy_nats", "sampler"))),
    ("AQN noise", "standard deviation", (("noise/sigma", "sigma"), ("noise/std_observed", "observed in the engine"))),
    ("Throughput", "tokens per second",
     (("rollout/tokens_per_second", "rollout"), ("step/tokens_per_second", "end to end"))),
)  # fmt: skip


@styled()
def save_curves(steps: pd.DataFrame, title: str, path: Path, weight_format: str) -> None:
    """Plot reward, entropy, noise and throughput of one run by step to the PNG file `path`. No smoothing.

    `steps` come from `runs.read_steps`; `weight_format` gives the color. Metrics that were not recorded have no panel,
    nor does noise that was always 0. The panel of the reward has a line for the total and for each part of it.
    """
    training = steps.loc[1:].dropna(axis=1, how="all")
    quiet = [metric for metric in training if metric.startswith("noise/") and not training[metric].any()]
    recorded = training.columns.difference(quiet)
    panels = [(name, unit, [line for line in lines if line[0] in recorded]) for name, unit, lines in PANELS]
    panels[0][2].extend((part, part.removeprefix("reward/")) for part in further_parts(recorded))
    panels = [panel for panel in panels if panel[2]]
    rows = max(1, math.ceil(len(panels) / 2))
    figure = plt.figure(figsize=(10, 3.25 * rows))
    grid = figure.add_gridspec(rows, 2)
    for number, (name, unit, lines) in enumerate(panels):
        is_alone = number == len(panels) - 1 and number % 2 == 0
        axis = figure.add_subplot(grid[number // 2, :] if is_alone else grid[number // 2, number % 2])
        for index, (metric, label) in enumerate(lines):
            shade = f"C{(index - 1) % 6 + 1}" if index else palette.color(weight_format)
            look = {"color": shade, "ls": ("-", "--", ":", "-.")[index % 4]}
            look["marker"] = "o" if training[metric].count() == 1 else ""  # a line needs two points
            axis.plot(training.index, training[metric], label=label, **look)
        columns = _columns_of_legend([label for _, label in lines])
        headroom = 1.03 + 0.17 * math.ceil(len(lines) / columns)  # for the legend
        lowest = min(0, *(training[metric].min() for metric, _ in lines))  # a part may be a punishment
        height = max(0, axis.get_ylim()[1]) - lowest
        axis.set(title=name, xlabel="step", ylabel=unit, ylim=(1.05 * lowest, lowest + headroom * height))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))  # there is no step 1.5
        axis.yaxis.set_major_formatter(format_tick)
        axis.legend(loc="upper left", ncols=columns)
    add_title(figure, title)
    path.write_bytes(png(figure))


def _columns_of_legend(names: Sequence[str]) -> int:
    """Choose the number of columns in a panel's legend: as many as fit, because a wider legend narrows the panel.

    `names` are the entries of the legend. matplotlib fills the columns from top to bottom, one after another.
    """
    for columns in range(min(len(names), MOST_IN_ROW), 1, -1):
        if sum(HANDLE_CHARS + max(map(len, column)) for column in np.array_split(names, columns)) <= ROW_CHARS:
            return columns
    return 1


def further_parts(metrics: Iterable[str]) -> list[str]:
    """List the parts of the reward among `metrics`, names such as `reward/tests`, without answer and format.

    These are the parts that a task adds, by name, and last the overlong punishment.
    """
    drawn = {metric for metric, _ in PANELS[0][2]}
    parts = {metric for metric in metrics if metric.startswith("reward/") and metric not in METRICS}
    return [*sorted(parts - drawn), *(metric for metric in metrics if metric == OVERLONG)]


@styled()
def save_entropy(arms: dict[str, tuple[float, float, float]], path: Path) -> None:
    """Plot entropy by arm, minus the entropy of the dense model, to the PNG file `path`.

    `arms` maps an arm to (mean, low, high) of the difference in nats per token.
    """
    names = [textwrap.fill(name, 40, break_on_hyphens=False) for name in arms]  # they hold paths of checkpoints
    figure, axis = plt.subplots(figsize=(8, 1.2 + 0.14 * len(arms) + 0.2 * len("\n".join(names).splitlines())))
    for row, (name, (mean, low, high)) in enumerate(arms.items()):
        shade = palette.color(name.partition(" ")[0])
        axis.errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3, color=shade)
    axis.axvline(0, color="gray", lw=0.8)
    axis.margins(x=0.05)
    axis.set_yticks(range(len(arms)), names)
    axis.set_ylim(len(arms) - 0.5, -0.5)
    axis.set(title="Entropy minus the dense model's", xlabel="nats per token, 95% interval over prompts")
    path.write_bytes(png(figure))


@styled()
def plot_block_values(values: Mapping[str, Sequence[float]]) -> Figure:
    """Plot the values that a weight can take, in a row per format, in units of the largest weight in its block."""
    figure, axis = plt.subplots(figsize=(8, 0.7 + 0.45 * len(values)))
    for row, (name, levels) in enumerate(values.items()):
        axis.plot(levels, [row] * len(levels), "|", ms=16, mew=1.8, color=palette.color(name, row))
    axis.set_yticks(range(len(values)), [f"{name}, {len(levels)} values" for name, levels in values.items()])
    axis.margins(x=0.04)
    axis.set(xlabel="weight, in units of the largest of its block", ylim=(len(values) - 0.4, -0.6))
    return figure


@styled()
def plot_block_maxima(stored: Mapping[str, Sequence[float]]) -> Figure:
    """Plot a histogram per format of the ratio stored / exact for the largest weight of each block.

    Ratios beyond the axis, as of NF4 in rows of unequal size, are in the outer bars, and their share is below the axis.
    """
    figure, axes = plt.subplots(1, len(stored), figsize=(3 * len(stored), 2.6), sharex=True, squeeze=False)
    for number, (axis, (name, ratios)) in enumerate(zip(axes.flat, stored.items(), strict=True)):
        shown = np.clip(ratios, 0.75, 1.25)
        beyond = np.mean(shown != ratios)
        axis.hist(shown, bins=40, range=(0.75, 1.25), color=palette.color(name, number))
        axis.axvline(1, color="0.3", lw=0.8)
        axis.set(title=name, xlabel=f"stored / exact{f', {beyond:.1%} beyond' if beyond else ''}", yticks=[])
    axes.flat[0].set_ylabel("blocks")
    return figure


@styled()
def plot_noise_and_formats(noise: pd.DataFrame, formats: pd.DataFrame) -> Figure:
    """Plot noise beside weight formats: left KL to the dense policy by sigma, right change of entropy by KL.

    `noise` and `formats` come from `format_effects.effects_of_noise` and `effects_of_formats` (packed formats only).
    Changes of entropy by formats have 95% intervals.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8))
    means = noise.groupby("sigma", as_index=False).mean()
    for axis, x, y in ((left, "sigma", "kl"), (right, "kl", "entropy_change")):
        axis.plot(noise[x], noise[y], ".", color="0.6", label="noise, each draw")
        axis.plot(means[x], means[y], "-", color="0.2", label="noise, mean")
    for row, (name, effect) in enumerate(formats.iterrows()):
        style = {"color": palette.color(str(name), row), "label": name}
        left.axhline(effect["kl"], ls=("--", ":", "-.")[row % 3], **style)
        change = effect["entropy_change"]
        ends = [[change - effect["change_low"]], [effect["change_high"] - change]]
        right.errorbar(effect["kl"], change, yerr=ends, fmt=MARKS[row % len(MARKS)], capsize=3, **style)
    left.set(xlabel="sigma", ylabel="KL to the dense policy, nats per token", xscale="log", yscale="log")
    left.set_xticks(means["sigma"], [f"{sigma:g}" for sigma in means["sigma"]])
    left.set_xticks([], minor=True)
    right.axhline(0, color="0.7", lw=0.8)
    right.set(xlabel="KL to the dense policy, nats per token", ylabel="change of entropy, nats per token", xscale="log")
    for axis in (left.yaxis, right.xaxis):
        axis.set_major_formatter(format_tick)  # matplotlib's would write powers as formulas, which the style turns off
    for axis in (left, right):
        axis.legend(fontsize="small", loc="upper left")
    return figure
