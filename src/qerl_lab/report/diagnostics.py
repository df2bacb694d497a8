"""Diagnose a comparison: pass@k, entropy against gain, entropy retained, collapse, and statistical power.

Everything is computed from recorded files: accuracies per question and metrics per step.
"""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter
from scipy import stats as distributions

from qerl_lab.report import palette, stats
from qerl_lab.report.comparison import Comparison, matrix
from qerl_lab.report.curves import LEGEND_CHARS, add_panel_legend
from qerl_lab.report.measures import FALLEN, Unmeasured, count_right, has_collapsed
from qerl_lab.report.palette import styled
from qerl_lab.report.runs import Run
from qerl_lab.report.stats import Interval, pass_at, powers_of_two
from qerl_lab.report.table import NONE, Table, geometric_cell

POWER = 0.8  # of a two-sided 5% test
SEEDS = np.unique(np.geomspace(2, 100, 40).round().astype(int))  # x axis of the power curve


def pass_at_each_k(runs: Sequence[Run]) -> dict[int, Interval]:
    """Return pass@k after training by k, over seeds and questions, within [0, 1].

    Raises Unmeasured without evaluation, for fewer than two seeds or samples, and for partly right answers.
    """
    right, samples = count_right(runs)
    right_S_Q, count = right.dropna(axis=1).to_numpy(int), int(samples.max())
    if min(right_S_Q.shape) < 2 or samples.nunique() > 1:
        raise Unmeasured("pass@k needs two seeds and questions, and equally many samples")
    return {
        k: stats.mean_of_arm(pd.DataFrame([pass_at(k, seed, count) for seed in right_S_Q]), stats.SHARE)
        for k in powers_of_two(count)
    }


def detectable_difference(differences_S_Q: np.ndarray, seeds: int) -> float:
    """Return the true difference that `seeds` seeds detect with `POWER` in a two-sided 5% test.

    Computed from the variances of the measured differences [seeds, questions] (`stats.floored_components`) as (t at
    97.5% + t at 80%) standard errors. More seeds do not reduce the questions' part.
    """
    variances, questions = stats.floored_components(differences_S_Q), np.shape(differences_S_Q)[1]
    levels = (0.95, 2 * POWER - 1)
    return sum(stats.half_width(variances, seeds, questions, level) for level in levels)


def retention(comparison: Comparison) -> Table:
    """Tabulate how much of its entropy each arm retained until the end, and how many of its runs collapsed."""
    rows = [["arm", "entropy, last tenth / first", "runs that collapsed"]]
    for arm, runs in comparison.arms.items():
        ratios = pd.Series([run.summary["entropy_last"] / run.summary["entropy_first"] for run in runs])
        retained = geometric_cell(ratios) if np.isfinite(ratios).all() and (ratios > 0).all() else NONE
        try:
            fell = np.array([has_collapsed(run) for run in runs], float)
        except Unmeasured:
            rows.append([arm, retained, NONE])
        else:
            _, low, high = stats.share_interval(fell, 1)
            rows.append([arm, retained, f"{int(fell.sum())} of {len(fell)} [{low:.2f}, {high:.2f}]"])
    return Table(
        "Retained entropy and collapse",
        "Entropy of the trainer's policy in the last tenth of the steps / in the first, geometric mean over seeds "
        "[95% interval] (seeds). A run has collapsed if its right answers in the last tenth of the steps are below "
        f"{FALLEN:.0%} of those in its best tenth; the share has a Wilson interval.",
        rows,
    )


@styled()
def draw_passes(comparison: Comparison) -> Figure | None:
    """Draw pass@k by k for every arm that has it; None if none has. The caller closes the figure."""
    found: dict[str, dict[int, Interval]] = {}
    for arm, runs in comparison.arms.items():
        try:
            found[arm] = pass_at_each_k(runs)
        except Unmeasured:
            continue
    if not found:
        return None
    figure, axis, looks = _create_panel(comparison)
    for place, (arm, by_k) in enumerate(found.items()):
        k, (mean, low, high) = np.array(list(by_k)), np.array(list(by_k.values())).T
        x = k * (1 + 0.02 * (place - (len(found) - 1) / 2))  # offset, so that intervals do not overlap
        axis.errorbar(x, mean, yerr=[mean - low, high - mean], capsize=2, elinewidth=0.9, **looks[arm])
    axis.set_xscale("log", base=2)
    axis.set_xticks(k, [str(one) for one in k])
    axis.set(title="pass@k after training", xlabel="k (samples per question)", ylabel="questions with a right answer")
    add_panel_legend(axis)
    return figure


@styled()
def draw_gains(comparison: Comparison) -> tuple[Figure, str] | None:
    """Plot entropy at the start against gain in held-out accuracy, a point per run, and describe the correlation.

    None if no run was evaluated. The caller closes the figure.
    """
    rows = [
        {"arm": arm, "entropy": run.summary["entropy_first"], "gain": run.accuracy["gain"].mean()}
        for arm, runs in comparison.arms.items() for run in runs if run.accuracy
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["arm", "entropy", "gain"]).replace([np.inf, -np.inf], np.nan).dropna()
    if len(table) < 2:
        return None
    figure, axis, looks = _create_panel(comparison)
    axis.locator_params(nbins=5)
    for arm, own in table.groupby("arm", sort=False):
        axis.plot(own["entropy"], own["gain"], **looks[str(arm)] | {"linestyle": ""})
    axis.set(title="Initial entropy and gain of a run", xlabel="policy entropy, first tenth of the steps (nats)",
             ylabel="gain in held-out accuracy")  # fmt: skip
    add_panel_legend(axis)
    within = table[["entropy", "gain"]] - table.groupby("arm")[["entropy", "gain"]].transform("mean")
    said = []
    for what, one in ((f"all {len(table)} runs", table), ("runs minus the mean of their arm", within)):
        if one["entropy"].std() > stats.NO_WIDTH and one["gain"].std() > stats.NO_WIDTH:
            found = distributions.pearsonr(one["entropy"], one["gain"])
            low, high = found.confidence_interval()  # by Fisher's z
            said.append(f"Correlation over {what}: {found.statistic:+.2f} [{low:+.2f}, {high:+.2f}].")
    return figure, " ".join(said)


@styled()
def draw_power(comparison: Comparison, baseline: str | None) -> Figure | None:
    """Plot the detectable difference to the baseline in held-out accuracy against the number of seeds.

    One line per arm, from the spread of its paired differences; None if no arm has two seeds and two questions.
    """
    found = {}
    for arm, runs in comparison.arms.items():
        if baseline is not None and arm != baseline:
            own = matrix(runs, "after") - matrix(comparison.arms[baseline], "after")
            values = own.dropna(how="all").dropna(axis=1).to_numpy()
            if min(values.shape) >= 2:
                found[arm] = [detectable_difference(values, int(seeds)) for seeds in SEEDS]
    if not found:
        return None
    figure, axis, looks = _create_panel(comparison)
    for arm, effects in found.items():
        axis.plot(SEEDS, effects, markevery=6, **looks[arm])
    axis.set(xscale="log", yscale="log", title=f"Detectable difference to {baseline}", xlabel="seeds",
             ylabel="held-out accuracy, power 80%")  # fmt: skip
    for ticks in (axis.xaxis, axis.yaxis):
        ticks.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ticks.set_minor_locator(NullLocator())
        ticks.set_major_formatter(ScalarFormatter())
    add_panel_legend(axis)
    return figure


def _create_panel(comparison: Comparison) -> tuple[Figure, Axes, Mapping[str, dict[str, Any]]]:
    """Create a figure with one panel, and choose look and label of each arm."""
    labels = {arm: textwrap.fill(arm, LEGEND_CHARS) for arm in comparison.arms}
    lines = sum(label.count("\n") + 1 for label in labels.values())
    figure, axis = plt.subplots(figsize=(4.4, 3.1 + 0.19 * lines))
    axis.margins(0.06)
    styles = palette.styles(palette.formats(comparison.arms))
    return figure, axis, {arm: look | {"label": labels[arm]} for arm, look in styles.items()}
