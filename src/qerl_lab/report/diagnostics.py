"""Draw what explains a comparison: effects of claims, pass@k, and entropy against gain."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qerl_lab.report import palette, stats, verdict_tables
from qerl_lab.report.claims import Claim
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.curves import LEGEND_CHARS, add_panel_legend
from qerl_lab.report.measures import MEASURES, Unmeasured, count_right
from qerl_lab.report.palette import format_tick, styled
from qerl_lab.report.runs import Run
from qerl_lab.report.stats import Interval, pass_at, values_of_k
from qerl_lab.report.verdicts import Row

PANELS_ACROSS = 3
NAME_CHARS, MEANING_CHARS, TITLE_CHARS = 24, 32, 28  # most characters in a line of: contrast, x label, panel's title
BELOW = 0.2  # of a row: the paper's effect is so much lower than the measured one, which it would hide
SPREAD = 0.4  # of k: the most by which the first and the last arm of a k are apart
SMALLEST: dict[str, Any] = {"color": "grey", "linestyle": ":", "linewidth": 0.9}
PAPER_MARK: dict[str, Any] = {"color": "grey", "linestyle": "", "marker": "D", "markerfacecolor": "white"}


class Passes(NamedTuple):
    """pass@k of one arm after training."""

    by_k: dict[int, Interval]  # k -> pass@k with its interval over seeds
    seeds: int  # number of seeds
    questions: int  # number of questions that all seeds answered


def pass_at_each_k(runs: Sequence[Run]) -> Passes:
    """Compute pass@k of an arm after training, for k = 1, 2, 4, ..., eval.samples.

    Raises Unmeasured for fewer than two seeds, questions or samples per question, and if an answer is partly right.
    """
    right, samples = count_right(runs)
    right_S_Q = right.dropna(axis=1).to_numpy(int)
    if min(right_S_Q.shape) < 2:
        raise Unmeasured("pass@k needs two seeds and questions")
    by_k = {
        k: stats.mean_of_arm(pd.DataFrame(pass_at(k, right_S_Q, samples)), stats.SHARE) for k in values_of_k(samples)
    }
    return Passes(by_k, *right_S_Q.shape)


@styled()
def draw_pass_at_k(comparison: Comparison) -> Figure | None:
    """Draw pass@k after training by k, a line per arm; None if no arm has pass@k. The caller closes the figure.

    The title has the number of questions, or the numbers if arms have different ones. The legend has each arm's seeds.
    """
    passes: dict[str, Passes] = {}
    for arm, runs in comparison.arms.items():
        try:
            passes[arm] = pass_at_each_k(runs)
        except Unmeasured:
            continue
    if not passes:
        return None
    figure, axis, looks = _create_panel(comparison, {arm: f"{arm} (n={own.seeds})" for arm, own in passes.items()})
    beside = min(0.02, SPREAD / len(passes))  # so that intervals do not overlap, nor the arms of two k mix
    for index, (arm, own) in enumerate(passes.items()):
        k, (mean, low, high) = np.array(list(own.by_k)), np.array(list(own.by_k.values())).T
        x = k * (1 + beside * (index - (len(passes) - 1) / 2))
        axis.errorbar(x, mean, yerr=[mean - low, high - mean], capsize=2, elinewidth=0.9, **looks[arm])
    axis.set_xscale("log", base=2)
    axis.set_xticks(k, [str(samples) for samples in k])
    questions = " or ".join(f"{number:,}" for number in sorted({own.questions for own in passes.values()}))
    axis.set(title=f"pass@k after training, {questions} questions", xlabel="k (samples per question)",
             ylabel="fraction with a right answer")  # fmt: skip
    add_panel_legend(axis)
    return figure


@styled()
def draw_gains(comparison: Comparison) -> tuple[Figure, str] | None:
    """Plot each run's gain in held-out accuracy against its initial entropy, a point per run.

    Returns the figure, and sentences with the correlation. Returns None for fewer than two evaluated runs.
    """
    rows = [
        {"arm": arm, "entropy": run.summary["entropy_first"], "gain": run.accuracy["gain"].mean()}
        for arm, runs in comparison.arms.items() for run in runs if run.accuracy
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["arm", "entropy", "gain"]).replace([np.inf, -np.inf], np.nan).dropna()
    if len(table) < 2:
        return None
    figure, axis, looks = _create_panel(comparison, {arm: arm for arm in comparison.arms})
    axis.locator_params(nbins=5)
    for arm, of_arm in table.groupby("arm", sort=False):
        axis.plot(of_arm["entropy"], of_arm["gain"], **looks[str(arm)] | {"linestyle": ""})
    axis.set(title="Initial entropy and gain of a run", xlabel="policy entropy, first tenth of the steps (nats)",
             ylabel="gain in held-out accuracy")  # fmt: skip
    add_panel_legend(axis)
    by_arm = table.groupby("arm")[["entropy", "gain"]]
    within = table[["entropy", "gain"]] - by_arm.transform("mean")
    sentences = []
    for what, points, means in (
        (f"all {len(table)} runs", table, 1),
        ("runs minus the mean of their arm", within, by_arm.ngroups),
    ):
        if points["entropy"].std() > stats.NO_WIDTH and points["gain"].std() > stats.NO_WIDTH:
            found, low, high = stats.correlation(points["entropy"], points["gain"], means)
            sentences.append(f"Correlation over {what}: {found:+.2f} [{low:+.2f}, {high:+.2f}].")
    return figure, " ".join(sentences)


@styled()
def draw_effects(rows: Sequence[Row]) -> Figure | None:
    """Draw the effects of contrasts with 95% intervals, a panel per claim, and the paper's effects as diamonds.

    An open circle is a contrast with fewer seeds than a verdict needs. A legend names the marks. Returns None if no row
    has numbers.
    """
    measured = [row for row in rows if row.numbers]
    panels = [list(own) for _, own in groupby(measured, lambda row: row.claim.name)]
    if not panels:
        return None
    across = min(PANELS_ACROSS, len(panels))
    levels = [panels[first : first + across] for first in range(0, len(panels), across)]  # panels side by side
    tallest = [max(map(len, level)) for level in levels]
    lines = 0  # of text above and below the panels
    for level in levels:
        lines += max(_title_of(own[0].claim).count("\n") for own in level)
        lines += max(_label_of(own[0].claim).count("\n") for own in level)
    size = (4.4 * across, 0.3 + 0.9 * len(levels) + 0.17 * lines + 0.5 * sum(tallest))
    figure, axes = plt.subplots(len(levels), across, figsize=size, squeeze=False, height_ratios=tallest)
    for number, (axis, own) in enumerate(zip(axes.flat, panels, strict=False)):
        _draw_claim(axis, own)
        axis.set_ylim(0.5 - tallest[number // across], 0.5)
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    marks = [  # in the legend
        Line2D([], [], color="black", marker="o", label="measured, 95% interval"),
        Line2D([], [], **SMALLEST, label="smallest effect that matters"),
    ]
    if not all(row.judged for row in measured):
        marks.append(Line2D([], [], color="black", marker="o", mfc="white", label="too few seeds for a verdict"))
    if any(row.contrast.printed for row in measured):
        marks.append(Line2D([], [], **PAPER_MARK, label="the paper's effect"))
    columns = 3
    if across == 1:  # one panel is narrower than two entries of the legend
        columns = 1
        figure.set_figheight(size[1] + 0.2 * (len(marks) - 1))
    figure.legend(handles=marks, loc="outside lower left", ncols=columns)
    return figure


def _title_of(claim: Claim) -> str:
    """Return a panel's title: the claim in words, because a reader of the figure does not know the claim's name."""
    return textwrap.fill(f"Claim: {claim.says}", TITLE_CHARS)


def _label_of(claim: Claim) -> str:
    """Return the label of the x axis: what the claim measures, how the arms are compared, and the unit."""
    measure = MEASURES[claim.measure]
    signs = "treated / control" if claim.is_ratio else f"treated - control, {measure.unit}"
    return f"{textwrap.fill(measure.meaning, MEANING_CHARS)}\n{signs}"


def _draw_claim(axis: Axes, rows: Sequence[Row]) -> None:
    """Draw the effects of one claim's contrasts, one below the other; `rows` are measured.

    An arrow to the edge of the panel is an end of an interval that has no bound.
    """
    claim = rows[0].claim
    axis.axvline(1.0 if claim.is_ratio else 0.0, color="black", linewidth=0.8)
    signs = [claim.direction] if claim.direction else [-1, 1]
    for sign in signs:
        matters = claim.smallest**sign if claim.is_ratio else sign * claim.smallest
        axis.axvline(matters, **SMALLEST)
    names = []
    for place, row in enumerate(rows):
        assert row.numbers is not None
        mean, *ends = row.numbers.effect
        widths = [[abs(end - mean) if math.isfinite(end) else 0.0] for end in ends]
        shade = palette.color(row.contrast.treated_settings.get("format.name", ""))
        inside = shade if row.judged else "white"
        axis.errorbar(mean, -place, xerr=widths, color=shade, marker="o", mfc=inside, capsize=3)
        for edge, end in enumerate(ends):
            if not math.isfinite(end):
                arrow = {"arrowstyle": "->", "color": shade, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
                axis.annotate("", (edge, -place), (mean, -place), ("axes fraction", "data"), "data", arrow)
        printed = [value for _, value in row.contrast.printed]
        axis.plot(printed, [-place - BELOW] * len(printed), **PAPER_MARK)
        name = verdict_tables.name_of(row)
        names.append(textwrap.fill(name, NAME_CHARS, break_long_words=False, break_on_hyphens=False))
    axis.set_yticks([-place for place in range(len(rows))], names)
    axis.set(title=_title_of(claim), xlabel=_label_of(claim))
    axis.margins(x=0.06)
    axis.locator_params(axis="x", nbins=5)
    axis.xaxis.set_major_formatter(format_tick)


def _create_panel(
    comparison: Comparison, labels: Mapping[str, str]
) -> tuple[Figure, Axes, Mapping[str, dict[str, Any]]]:  # fmt: skip
    """Create a figure with one panel; also return the arguments of `plot` (look and legend label) for each arm.

    `labels` maps the arms that are drawn to their text in the legend.
    """
    filled = {arm: textwrap.fill(label, LEGEND_CHARS) for arm, label in labels.items()}
    lines = sum(label.count("\n") + 1 for label in filled.values())
    figure, axis = plt.subplots(figsize=(4.4, 3.1 + 0.19 * lines))
    axis.margins(0.06)
    styles = palette.styles_of_arms(comparison.arms)  # of all arms, so that an arm looks alike in every figure
    return figure, axis, {arm: styles[arm] | {"label": label} for arm, label in filled.items()}
