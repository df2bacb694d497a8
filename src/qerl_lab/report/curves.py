"""Plot curves of arms by step and by wall clock: thin lines for seeds, their mean, 95% interval. No smoothing.

Held-out accuracy that was measured only before and after training is plotted as points with intervals.
"""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator

from qerl_lab.report import palette
from qerl_lab.report.arms import format_setting
from qerl_lab.report.comparison import Comparison, accuracy_matrix
from qerl_lab.report.palette import add_legend_below, add_title, format_tick, styled
from qerl_lab.report.reference import is_plain
from qerl_lab.report.runs import Arm, Run
from qerl_lab.report.stats import NATS, SHARE, band_over_seeds, mean_of_arm

STEP, CLOCK = "step", "seconds"  # the x axis: the training step, or the time spent in training steps
ARMS_A_PANEL = 4  # most arms that share one panel; with more, bands would hide lines
MOST_COLUMNS = 3  # panels beside each other: so wide a figure still fits a slide or a page
PAIR = 2  # arms per panel, besides the baseline, if the arms of a format need several panels
MOMENTS = 100  # most points of a mean curve by wall clock
MARKS = 10  # markers per line
LEGEND_CHARS = 46  # characters per line of the legend
DODGE = 0.07  # distance between arms that are measured before and after training, which are 1 apart
Arms = Mapping[str, Sequence[Run]]  # label -> runs
Values = dict[str, list[pd.Series]]  # label -> values of a metric, a series per run


class Line(NamedTuple):
    """What a panel draws for one arm.

    Attributes:
        runs: the arm's runs.
        series: the values of the metric, one series per run.
        look: arguments of `Axes.plot`, such as the color, and the label in the legend.
    """

    runs: Sequence[Run]
    series: Sequence[pd.Series]
    look: Mapping[str, Any]


@dataclass(frozen=True)
class Curve:
    """One figure of a metric: file name, title, label of the y axis, and metric.

    `from_zero` lets the y axis start at 0. `bounds` are the smallest and the largest value that the metric can have.
    """

    name: str
    title: str
    label: str
    metric: str
    from_zero: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)


CURVES = (
    Curve("reward", "Reward", "mean reward of a step", "reward/mean"),
    Curve("entropy", "Entropy of the trainer's policy", "nats per token", "policy/entropy_nats", bounds=NATS),
    Curve("sampler_entropy", "Entropy of the (noisy) sampler", "nats per token", "sampler/entropy_nats", bounds=NATS),
    Curve("accuracy", "Held-out accuracy, all questions", "fraction right", "eval/accuracy", bounds=SHARE),
    Curve("subset_accuracy", "Held-out accuracy, the first questions", "fraction right", "eval/subset_accuracy",
          bounds=SHARE),
    Curve("throughput", "Throughput, end to end", "tokens per second", "step/tokens_per_second", from_zero=True),
    Curve("rollout_throughput", "Throughput of rollouts", "tokens per second", "rollout/tokens_per_second",
          from_zero=True),
    Curve("sigma", "Sigma of the noise, in arms that have it", "standard deviation", "noise/sigma", from_zero=True),
)  # fmt: skip


def recorded_curves(arms: Arms) -> list[Curve]:
    """Return the entries of `CURVES` that have a value in a run; the noise's sigma also needs one other than 0."""
    return [curve for curve in CURVES if _values_of_arms(arms, curve)]


def _values_of_arms(arms: Arms, curve: Curve, by: str = STEP) -> Values:
    """Return the recorded values of a metric by arm, a series per run, without arms that have none.

    The index is the step or with `CLOCK` the sum of step/seconds so far. A sigma that is always 0 is left out, since a
    line at 0 says nothing.
    """
    found: Values = {}
    for arm, runs in arms.items():
        series = []
        for run in (run for run in runs if curve.metric in run.steps):
            values = run.steps[curve.metric].dropna()
            if by == CLOCK:
                values.index = run.steps["step/seconds"].astype("float64").fillna(0).cumsum()[values.index]
            series.append(values)
        if any(values.any() if curve.metric == "noise/sigma" else len(values) for values in series):
            found[arm] = series
    return found


def draw(
    arms: Arms, curve: Curve, by: str, baseline: str | None, styles: Mapping[str, Mapping[str, Any]]
) -> Figure:  # fmt: skip
    """Draw one metric, in several panels if there are many arms; the caller closes the figure.

    The arm `baseline`, if any, is first in each panel; `_panels` distributes the others. `arms` maps labels to runs,
    `styles` come from `palette.styles`. `by` is the x axis, `STEP` or `CLOCK`.
    """
    chosen, unit = _values_of_arms(arms, curve, by), "step"
    if by == CLOCK:
        longest = max(values.index.max() for series in chosen.values() for values in series)
        name, seconds = "seconds", 1
        if longest >= 7200:
            name, seconds = "hours", 3600
        elif longest >= 120:
            name, seconds = "minutes", 60
        unit = f"{name} of training steps"
        chosen = {arm: [values.set_axis(values.index / seconds) for values in own] for arm, own in chosen.items()}
    first = [baseline] if baseline in chosen else []
    others = [arm for arm in chosen if arm != baseline]
    groups = [[*first, *panel] for panel in _panels(others, styles, ARMS_A_PANEL - len(first))]
    rows = math.ceil(len(groups) / MOST_COLUMNS)
    columns = math.ceil(len(groups) / rows)
    labels = {arm: textwrap.fill(f"{arm} (n={len(series)})", LEGEND_CHARS) for arm, series in chosen.items()}
    lines = {arm: Line(arms[arm], chosen[arm], {**styles[arm], "label": label}) for arm, label in labels.items()}
    legend_lines = [sum(labels[arm].count("\n") + 1 for arm in group) for group in groups]
    most_lines = [max(legend_lines[start : start + columns]) for start in range(0, len(groups), columns)]  # by row
    height = sum(2.9 + 0.19 * count for count in most_lines)
    with styled():
        figure, axes = plt.subplots(
            rows, columns, sharey=True, sharex=True, squeeze=False, figsize=(4.4 * columns, height),
            height_ratios=[12 + count for count in most_lines],
        )  # fmt: skip
        for axis, group in zip(axes.flat, groups, strict=False):
            _draw_panel(axis, [lines[arm] for arm in group], curve, _is_line(chosen, curve), by=by, unit=unit)
            add_panel_legend(axis)
        for axis in axes[:, 1:].flat:
            axis.set_ylabel("")
        for axis in axes.flat[len(groups) :]:
            axis.remove()
        axes.flat[0].set_title(curve.title)
        _limit_y_axis(axes.flat[0], chosen, curve)
    return figure


def _panels(arms: Sequence[str], styles: Mapping[str, Mapping[str, Any]], most: int) -> list[Sequence[str]]:
    """Distribute sorted arms over panels: all in one if they are at most `most`, else a panel per weight format.

    A format with more than `most` arms gets a panel per pair of its arms. If all arms have one format, or each has its
    own, all arms are paired in their order. Of an odd number the first arm gets a panel alone, because the later pairs
    are usually an arm with and without noise.
    """
    if len(arms) <= most:
        return [arms]
    by_color: dict[str, list[str]] = {}  # the order of labels may separate arms of one format
    for arm in arms:
        by_color.setdefault(styles[arm]["color"], []).append(arm)
    formats: list[Sequence[str]] = [*by_color.values()]
    are_formats = len(by_color.keys() & {*palette.FORMATS.values()}) > 1  # else colors tell apart arms of one format
    if not are_formats or len(formats) == len(arms):
        formats = [arms]
    panels = list[Sequence[str]]()
    for group in formats:
        size = len(group) if len(group) <= most else PAIR
        alone = len(group) % size
        if alone:
            panels.append(group[:alone])
        panels += [group[start : start + size] for start in range(alone, len(group), size)]
    return panels


def group_formats(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Group arms that differ only in weight format; return title of the group -> weight format -> label of the arm.

    Only plain arms (`reference.is_plain`) take part. Only groups of several formats are returned, sorted from most to
    fewest formats, then from most to fewest runs.
    """
    found: dict[Arm, dict[str, str]] = {}  # other settings -> format -> label
    for label, runs in comparison.arms.items():
        if is_plain(runs[0]):
            settings = dict(runs[0].arm)  # identifies a local model by content, not by path
            rest = tuple(sorted(item for item in settings.items() if not item[0].startswith("format.")))
            found.setdefault(rest, {}).setdefault(settings["format.name"], label)

    def size(rest: Arm) -> tuple[int, int]:
        """Return the number of formats and the number of runs in the group with the settings `rest`."""
        return len(found[rest]), sum(len(comparison.arms[label]) for label in found[rest].values())

    several = sorted((rest for rest, formats in found.items() if len(formats) > 1), key=size, reverse=True)
    shared = set.intersection(*map(set, several)) if several else set()
    titled = dict[str, dict[str, str]]()
    for rest in several:
        title = ", ".join(format_setting(*setting) for setting in rest if setting not in shared)
        formats = found[rest]
        names = [*palette.FORMATS, *formats]  # a format deleted since its runs is last
        titled[title] = {name: formats[name] for name in names if name in formats}
    return titled


@styled()
def draw_formats(arms: Arms, formats: Mapping[str, str], title: str) -> Figure:
    """Draw reward, policy entropy and held-out accuracy by step, a panel each, with a line per weight format.

    `arms` maps labels to runs, `formats` and `title` come from `group_formats`. The caller closes the figure.
    """
    arms = {arm: arms[arm] for arm in formats.values()}
    recorded = {curve.name: curve for curve in recorded_curves(arms)}
    accuracy = "subset_accuracy" if "subset_accuracy" in recorded else "accuracy"
    shown = [recorded[name] for name in ("reward", "entropy", accuracy) if name in recorded]
    looks = palette.styles({arm: name for name, arm in formats.items()})
    for name, arm in formats.items():
        looks[arm]["label"] = f"{name} (n={len(arms[arm])})"
    figure, axes = plt.subplots(1, len(shown), figsize=(4.4 * len(shown), 3.7), squeeze=False)
    for axis, curve in zip(axes.flat, shown, strict=True):
        chosen = _values_of_arms(arms, curve)
        lines = [Line(arms[arm], series, looks[arm]) for arm, series in chosen.items()]
        _draw_panel(axis, lines, curve, _is_line(chosen, curve), show_seeds=False)
        axis.set_title(curve.title)
        _limit_y_axis(axis, chosen, curve)
    add_legend_below(figure)
    add_title(figure, title)
    return figure


def _limit_y_axis(axis: Axes, chosen: Values, curve: Curve) -> None:
    """Cut the y axis of a drawn panel to `curve.bounds`, and let it begin at 0 with `curve.from_zero`.

    With lines, the axis also ends at most a quarter of the values' range beyond the values, because wide bands would
    flatten the lines.
    """
    values, margin = pd.concat([values for own in chosen.values() for values in own]), math.inf
    if _is_line(chosen, curve):
        margin = (values.max() - values.min()) / 4 or abs(values.max()) or 1.0
    (low, high), (least, most) = axis.get_ylim(), curve.bounds
    low = 0 if curve.from_zero else max(low, values.min() - margin, least)
    axis.set_ylim(low, min(high, values.max() + margin, most))


def _draw_panel(
    axis: Axes, lines: Sequence[Line], curve: Curve, is_line: bool, *, by: str = STEP, show_seeds: bool = True,
    unit: str = "step",
) -> None:  # fmt: skip
    """Draw arms as lines with `is_line`, else as points, because they were measured only before and after training.

    `by` is the x axis, `unit` its label. `show_seeds` adds the single seeds of each arm.
    """
    for number, line in enumerate(lines):
        if is_line:
            _draw_line(axis, line, by, curve, show_seeds, number / len(lines))
        else:
            beside = DODGE * (number - (len(lines) - 1) / 2) if by == STEP else None
            _draw_two_points(axis, line, beside, curve, show_seeds)
    if is_line:
        style_panel(axis, curve.label, unit)
    elif by == STEP:
        style_panel(axis, curve.label, "training")
        axis.set_xticks([0, 1], ["before", "after"])
        axis.set_xlim(-0.4, 1.4)
    else:
        style_panel(axis, curve.label, f"{unit}: before and after them")
        axis.margins(x=0.05)  # the points are at the ends


def _is_line(chosen: Values, curve: Curve) -> bool:
    """Tell whether to draw lines; a metric measured only before and after training is drawn as points."""
    return max(len(values) for own in chosen.values() for values in own) > 2 or not curve.metric.startswith("eval/")


def _draw_two_points(axis: Axes, line: Line, beside: float | None, curve: Curve, show_seeds: bool) -> None:
    """Draw an arm as two points, its means before and after training, with 95% intervals and a dotted line between.

    The interval of held-out accuracy is over seeds and questions, as in the tables; for other metrics it is over seeds.
    The points are at x = `beside` and `beside` + 1. If `beside` is None, they are at the mean x of their values.
    """
    x, means, ends, color = list[float](), list[float](), list[tuple[float, float]](), line.look["color"]
    for is_after in (False, True):
        values = pd.concat([of_run[(of_run.index > 0) == is_after] for of_run in line.series])
        if values.empty:
            continue
        mean, low, high = math.nan, math.nan, math.nan
        if curve.metric == "eval/accuracy":
            mean, low, high = mean_of_arm(accuracy_matrix(line.runs, "after" if is_after else "before"), SHARE)
        if math.isnan(low):
            of_seeds = values.to_numpy(float)[:, None]
            mean, low, high = (np.clip(end, *curve.bounds).item() for end in band_over_seeds(of_seeds))
        x.append(float(values.index.to_numpy().mean()) if beside is None else is_after + beside)
        means.append(mean)
        ends.append((mean - low, high - mean))
        if show_seeds and len(values) > 1:
            axis.plot([x[-1]] * len(values), values, ".", color=color, ms=4, alpha=0.4)
    axis.plot(x, means, zorder=3, **{**line.look, "linestyle": ":", "lw": 0.8})
    axis.errorbar(x, means, yerr=np.transpose(ends), fmt="none", ecolor=color, elinewidth=1.2, capsize=3,
                  clip_on=False, zorder=3)  # fmt: skip


def _draw_line(axis: Axes, line: Line, by: str, curve: Curve, show_seeds: bool, phase: float) -> None:
    """Draw an arm as a line: the mean over its seeds as a thick line, and its 95% interval as a band.

    `show_seeds` adds a thin line per seed. Seeds have values at different times if `by` is `CLOCK`. Then each seed is
    interpolated linearly, and the mean covers only the time in which all seeds ran. `phase`, from 0 to 1, shifts the
    markers by this part of their distance. They are above all lines: an arm with the values of another stays visible.
    """
    seeds, color = line.series, line.look["color"]
    if show_seeds and len(seeds) > 1:
        for values in seeds:
            axis.plot(values.index, values, color=color, ls="-", marker="", lw=0.5, alpha=0.4)
    if by == STEP or len(seeds) == 1:
        table = pd.concat(seeds, axis=1, join="inner").sort_index()
        x, values_S_T = table.index.to_numpy(), table.to_numpy(float).T
    else:
        first, last = max(values.index[0] for values in seeds), min(values.index[-1] for values in seeds)
        measured = np.unique(np.concatenate([values.index for values in seeds]))
        x = measured[(first <= measured) & (measured <= last)]
        x = x if len(x) <= MOMENTS else np.linspace(first, last, MOMENTS)
        values_S_T = np.array([np.interp(x, values.index, values) for values in seeds])
    mean, low, high = (np.clip(end, *curve.bounds) for end in band_over_seeds(values_S_T))
    if len(seeds) > 1:
        axis.fill_between(x, low, high, color=color, alpha=0.13, lw=0)
    halo = [Stroke(linewidth=3.2, foreground="white"), Normal()]  # sets the mean off from the seeds, in grey too
    marks = max(1, len(x) // MARKS)
    first = int(phase * marks)
    axis.plot(x[first::marks], mean[first::marks], zorder=4, **{**line.look, "label": None, "linestyle": ""})
    # The line has the markers too, because the legend shows it.
    axis.plot(x, mean, markevery=(first, marks), zorder=3, path_effects=halo, **line.look)


def style_panel(axis: Axes, label: str, unit: str) -> None:
    """Label the x axis `unit` and the y axis `label`, and spell the numbers at ticks by `format_tick`.

    If `unit` is step or stage, the ticks of the x axis are at whole numbers.
    """
    axis.set(xlabel=unit, ylabel=label)
    is_whole = unit in ("step", "stage")  # there is no step 1.5
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=is_whole, min_n_ticks=1 if is_whole else 2))
    axis.xaxis.set_major_formatter(format_tick)
    axis.yaxis.set_major_formatter(format_tick)


def add_panel_legend(axis: Axes) -> None:
    """Add a legend to a panel, below the tick labels of its x axis.

    The distance is in font sizes, since panels vary in height.
    """
    axis.tick_params(labelbottom=True)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3.7)
