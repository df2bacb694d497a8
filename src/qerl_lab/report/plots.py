"""Figures of one run, of several arms, and of quantization errors."""

import itertools
import math
import re
import textwrap
from collections.abc import Mapping
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_lab.report import palette
from qerl_lab.report.curves import STYLE, draw_arm, seeds_of

PANELS = (  # title, y label, (metric, label) for each line
    ("Reward", "reward", (("reward/mean", "total"), ("reward/answer", "answer"), ("reward/format", "format"))),
    ("Entropy", "nats per token", (("policy/entropy_nats", "policy"), ("sampler/entropy_nats", "noisy sampler"))),
    ("AQN noise", "standard deviation", (("noise/sigma", "sigma"), ("noise/std_observed", "observed in the engine"))),
    (
        "Throughput",
        "tokens per second",
        (("rollout/tokens_per_second", "rollout"), ("step/tokens_per_second", "end to end")),
    ),
)
ARM_PANELS = {  # metric: (title, y label)
    "reward/mean": ("Reward", "mean reward of a step"),
    "policy/entropy_nats": ("Entropy of the trainer's policy", "nats per token"),
    "sampler/entropy_nats": ("Entropy of the (noisy) sampler", "nats per token"),
}


def save_curves(steps: pd.DataFrame, title: str, path: Path) -> None:
    """Plot reward, entropy, sigma and throughput of one run by step, from `runs.read_steps`. No smoothing.

    Metrics that were not recorded have no panel; neither has noise that was always 0.
    """
    training = steps.loc[1:].dropna(axis=1, how="all")
    quiet = [metric for metric in training if metric.startswith("noise/") and not training[metric].any()]
    recorded = training.columns.difference(quiet)
    panels = [(name, unit, [line for line in lines if line[0] in recorded]) for name, unit, lines in PANELS]
    panels = [panel for panel in panels if panel[2]]
    rows = max(1, math.ceil(len(panels) / 2))
    figure, axes = plt.subplots(rows, 2, figsize=(10, 3.25 * rows), layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (name, unit, lines) in zip(axes.flat, panels, strict=False):
        for n, (metric, label) in enumerate(lines):
            axis.plot(training.index, training[metric], label=label, lw=1.4, ls="-" if n == 0 else "--")
        _dress(axis, name, unit)
        axis.set_ylim(top=1.2 * axis.get_ylim()[1])  # makes room for the legend
        axis.legend(frameon=False, loc="upper left", ncols=len(lines))
    figure.suptitle(textwrap.fill(title, 80))  # as wide as the figure
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_arms(curves: pd.DataFrame, formats: Mapping[str, str], path: Path) -> None:
    """Plot reward and entropies of several arms, from `comparison.curves`; `formats` maps arms to weight formats."""
    logged = set(curves.loc[curves["value"].notna(), "metric"])  # some engines record no entropy
    figure = compare_arms(curves, formats, {name: texts for name, texts in ARM_PANELS.items() if name in logged})
    figure.savefig(path, dpi=130)
    plt.close(figure)


def compare_arms(curves: pd.DataFrame, formats: Mapping[str, str], metrics: dict[str, tuple[str, str]]) -> Figure:
    """Draw one panel per metric: each arm's mean over seeds thick with its 95% interval, every seed thin. No smoothing.

    Args:
        curves: tidy, with the columns run_id, arm, metric, step and value; sets the order of arms.
        formats: arm -> weight format.
        metrics: metric name -> (title of its panel, label of its axis).
    """
    arms = list(curves["arm"].unique())
    width, seeds_by_arm = 5 * len(metrics), curves.groupby("arm")["run_id"].nunique()
    names = [textwrap.fill(f"{arm} (n={seeds_by_arm[arm]})", 10 * width) for arm in arms]  # 10 characters an inch
    per_row = max(1, min(len(arms), int(width / (0.5 + 0.08 * max(map(len, names), default=0)))))  # inches
    height = 4 + 0.2 * math.ceil(sum(name.count("\n") + 1 for name in names) / per_row)
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, len(metrics), figsize=(width, height), squeeze=False)
        styles = palette.styles(formats)
        for axis, (metric, (title, label)) in zip(axes.flat, metrics.items(), strict=True):
            for arm, name in zip(arms, names, strict=True):
                chosen = curves[(curves["arm"] == arm) & (curves["metric"] == metric) & (curves["step"] > 0)]
                if seeds := seeds_of(chosen.dropna()):
                    draw_arm(axis, seeds, styles[arm], name, common=True)
            _dress(axis, title, label)
        handles = axes.flat[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=per_row)
    return figure


def save_sqnr(layers: dict[str, float | None], title: str, path: Path) -> None:
    """Plot the SQNR of every quantized Linear by layer, with a line per kind of Linear (q_proj ...).

    Args:
        layers: dB by full module name (model.layers.3.self_attn.q_proj); None for a lossless Linear.
    """
    numbers = {name: int(found[1]) for name in layers if (found := re.search(r"\.(\d+)\.", name))}
    behind = max(numbers.values(), default=-1) + 1  # position of an lm_head
    kinds: dict[str, list[tuple[int, float]]] = {}
    for name, level in layers.items():
        point = (numbers.get(name, behind), math.nan if level is None else level)
        kinds.setdefault(name.rpartition(".")[2], []).append(point)
    figure, axis = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for (kind, points), marker in zip(kinds.items(), itertools.cycle("osD^v<>")):
        axis.plot(*zip(*sorted(points), strict=True), marker=marker, ms=3.5, lw=1.2, label=kind)
    axis.set(title=title, xlabel="layer", ylabel="SQNR (dB)")
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, (low + high) / 2 - 1), max(high, (low + high) / 2 + 1))  # 2 dB at least: less is no pattern
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, loc="outside right upper")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def save_entropy(arms: dict[str, tuple[float, float, float]], shares: dict[str, dict[str, float]], path: Path) -> None:
    """Plot the entropy of each arm minus the dense model's with its interval, beside the parts of its weight error.

    Args:
        arms: arm -> (mean, low, high) in nats per token, in drawing order.
        shares: arm -> share of each part of the error, for some arms; below 0 where a part cancels others. A part that
            is 0 in all arms is not in the legend.
    """
    names = list(arms)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 1.6 + 0.34 * len(names)), layout="constrained", sharey=True, width_ratios=(3, 2)
    )
    for row, (mean, low, high) in enumerate(arms.values()):
        shade = palette.color(names[row].partition(" ")[0])
        left.errorbar(mean, row, xerr=[[mean - low], [high - mean]], fmt="o", ms=4, capsize=3, color=shade)
    left.axvline(0, color="gray", lw=0.8)
    left.set(title="Entropy minus the dense model's", xlabel="nats per token, 95% interval over prompts")
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    colors: dict[str, str] = {}
    for row, name in enumerate(names):
        ends = {True: 0.0, False: 0.0}  # end of the bar so far, above and below 0
        for part, share in shares.get(name, {}).items():
            color = colors.setdefault(part, f"C{len(colors)}")
            if share:
                right.barh(row, share, left=ends[share > 0], color=color, label=part, height=0.6)
                ends[share > 0] += share
    handles = dict(zip(*reversed(right.get_legend_handles_labels()), strict=True))
    right.set(title="Parts of the weights' error", xlabel="share of the squared error")
    if handles:
        figure.legend(handles.values(), handles.keys(), loc="outside lower right", ncols=len(handles), frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25, axis="x")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _dress(axis: Axes, title: str, label: str) -> None:
    axis.set(title=title, xlabel="step", ylabel=label)
    axis.margins(x=0.01)
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no step 1.5
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
