"""Plot curves of arms by step and by wall clock: thin lines for seeds, their mean, 95% interval. No smoothing."""

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from matplotlib.ticker import MaxNLocator
from PIL import Image

from qerl_lab.report.palette import format_tick
from qerl_lab.report.stats import NATS, SHARE, band_over_seeds

STYLE = Path(__file__).with_name("report.mplstyle")
STEP, CLOCK = "step", "seconds"  # columns of `comparison.curves`
ARMS_A_PANEL = 4  # with more, bands hide lines
BESIDE = 2  # arms per panel beside the baseline when there are several panels
MOMENTS = 100  # most times at which the mean by wall clock is interpolated
DPI = 160  # 704 pixels wide: sharp on a phone and at half the width of a page
MARKS = 10  # markers per line
LEGEND_CHARS = 46  # characters per line of the legend


@dataclass(frozen=True)
class Curve:
    """One figure: file name, title, axis label and metric.

    `from_zero` starts the axis at 0; `bounds` are the possible values.
    """

    name: str
    title: str
    label: str
    metric: str
    from_zero: bool = False
    bounds: tuple[float, float] = (-math.inf, math.inf)

    @property
    def is_speed(self) -> bool:
        return self.metric.endswith("tokens_per_second")


CURVES = (
    Curve("reward", "Reward", "mean reward of a step", "reward/mean"),
    Curve("entropy", "Entropy of the trainer's policy", "nats per token", "policy/entropy_nats", bounds=NATS),
    Curve("sampler_entropy", "Entropy of the (noisy) sampler", "nats per token", "sampler/entropy_nats", bounds=NATS),
    Curve("accuracy", "Held-out accuracy, all questions", "right answers", "eval/accuracy", bounds=SHARE),
    Curve(
        "subset_accuracy",
        "Held-out accuracy, the first questions",
        "right answers",
        "eval/subset_accuracy",
        bounds=SHARE,
    ),
    Curve("throughput", "Throughput, end to end", "tokens per second", "step/tokens_per_second", True),
    Curve("rollout_throughput", "Throughput of rollouts", "tokens per second", "rollout/tokens_per_second", True),
    Curve("sigma", "Sigma of the noise, in arms that have it", "standard deviation", "noise/sigma", True),
)


def recorded_curves(points: pd.DataFrame) -> list[Curve]:
    """Return the `CURVES` that some run recorded; sigma only if it was ever not 0."""
    points = points[points["value"].notna()]
    used = set(points.loc[(points["metric"] != "noise/sigma") | (points["value"] != 0), "metric"])
    return [curve for curve in CURVES if curve.metric in used]


def panels(arms: Sequence[str], baseline: str | None) -> list[list[str]]:
    """Split the arms into few readable panels, the baseline first in each.

    An incomplete panel comes first, so that an arm and the next one, the same with noise, share a panel.
    """
    first = [arm for arm in arms if arm == baseline]
    others = [arm for arm in arms if arm != baseline]
    if len(arms) <= ARMS_A_PANEL:
        return [[*first, *others]]
    starts = range(len(others) % BESIDE - BESIDE if len(others) % BESIDE else 0, len(others), BESIDE)
    return [[*first, *others[max(start, 0) : start + BESIDE]] for start in starts]


def draw(
    points: pd.DataFrame, curve: Curve, by: str, baseline: str | None, styles: Mapping[str, Mapping[str, Any]]
) -> Figure:  # fmt: skip
    """Draw one metric in panels below each other, a few arms each; the caller closes the figure.

    Args:
        points: tidy, from `comparison.curves`.
        by: `STEP`, or `CLOCK`: seconds of training steps, without evaluation and loading.
        styles: the look of each arm, from `palette.styles`.
    """
    chosen = _points_of(points, curve)
    groups = panels(list(chosen["arm"].unique()), baseline)
    unit, size = _unit(chosen[by].max()) if by == CLOCK else ("step", 1)
    seeds = {arm: seeds_of(of_arm, by, size) for arm, of_arm in chosen.groupby("arm")}
    labels = {arm: textwrap.fill(f"{arm} (n={len(of_arm)})", LEGEND_CHARS) for arm, of_arm in seeds.items()}
    with plt.style.context(STYLE):
        lines = [sum(labels[arm].count("\n") + 1 for arm in group) for group in groups]
        shape = {"figsize": (4.4, sum(2.9 + 0.19 * count for count in lines)), "height_ratios": [12 + n for n in lines]}
        figure, axes = plt.subplots(len(groups), 1, sharey=True, sharex=True, squeeze=False, **shape)
        for axis, group in zip(axes.flat, groups, strict=True):
            for arm in group:
                draw_arm(axis, seeds[arm], styles[arm], labels[arm], common=by == STEP, bounds=curve.bounds)
            style_panel(axis, curve.label, unit)
        axes.flat[0].set_title(curve.title, loc="left")
        axes.flat[0].set_ylim(*_limits(axes.flat[0].get_ylim(), chosen["value"], curve))
    return figure


def side_by_side(
    points: pd.DataFrame, shown: Sequence[Curve], labels: Mapping[str, str], styles: Mapping[str, Mapping[str, Any]],
    title: str = "", *, thin: bool = True,
) -> Figure:  # fmt: skip
    """Draw a panel per curve beside each other, with a line per arm and one legend below; the caller closes the figure.

    Args:
        points: tidy, from `comparison.curves`; step 0 is drawn of held-out accuracy only.
        labels: the text of each arm in the legend.
        thin: whether to draw the line of each seed, too.
    """
    chosen = points[points["arm"].isin([*labels]) & points["value"].notna()]
    width, seeds_by_arm = 4.4 * len(shown), chosen.groupby("arm")["run_id"].nunique()
    texts = {  # 10 characters an inch
        arm: textwrap.fill(f"{label} (n={seeds_by_arm.get(arm, 0)})", int(10 * width)) for arm, label in labels.items()
    }
    per_row = max(1, min(len(texts), int(width / (0.5 + 0.08 * max(map(len, texts.values()))))))  # inches
    with plt.style.context(STYLE):
        height = 3.7 + 0.2 * math.ceil(sum(text.count("\n") + 1 for text in texts.values()) / per_row)
        figure, axes = plt.subplots(1, len(shown), figsize=(width, height), squeeze=False)
        for axis, curve in zip(axes.flat, shown, strict=True):
            of_curve = chosen[chosen["metric"] == curve.metric]
            for arm, text in texts.items():
                if seeds := seeds_of(of_curve[of_curve["arm"] == arm]):
                    draw_arm(axis, seeds, styles[arm], text, common=True, bounds=curve.bounds, thin=thin)
            axis.set_title(curve.title, loc="left")
            axis.set(xlabel="step", ylabel=curve.label, ylim=_limits(axis.get_ylim(), of_curve["value"], curve))
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axis.yaxis.set_major_formatter(format_tick)
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=per_row)
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def seeds_of(of_arm: pd.DataFrame, by: str = STEP, unit: float = 1) -> dict[str, pd.Series]:
    """Map each run of an arm to its values over steps, or over time in units of `unit` seconds."""
    return {run: rows.set_index(by)["value"].rename(index=lambda x: x / unit) for run, rows in of_arm.groupby("run_id")}


def _points_of(points: pd.DataFrame, curve: Curve) -> pd.DataFrame:
    """Select the points of a curve; for sigma only of arms with noise, as a line at 0 says nothing."""
    chosen = points[(points["metric"] == curve.metric) & points["value"].notna()]
    return chosen[chosen.groupby("arm")["value"].transform("any")] if curve.metric == "noise/sigma" else chosen


def _limits(drawn: tuple[float, float], values: pd.Series, curve: Curve) -> tuple[float, float]:
    """Return the axis limits of all panels: the data, and intervals up to a quarter of the data's range beyond it.

    The interval of two seeds spans 12.7 standard errors on either side and would flatten the curves.
    """
    room = (values.max() - values.min()) / 4 or abs(values.max()) or 1.0
    low, high = max(drawn[0], values.min() - room, curve.bounds[0]), min(drawn[1], values.max() + room, curve.bounds[1])
    return 0 if curve.from_zero else low, high


def png(figure: Figure) -> bytes:
    """Render a figure as a PNG of 64 colors and close it."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    plt.close(figure)
    return in_64_colors(drawn.getvalue())


def in_64_colors(png: bytes) -> bytes:
    """Reduce a PNG to 64 colors, a third of its size. Without k-means rounds all thin lines turn grey."""
    small, drawn = io.BytesIO(), Image.open(io.BytesIO(png)).convert("RGB")
    drawn.quantize(64, kmeans=3, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return small.getvalue()


def _unit(seconds: float) -> tuple[str, int]:
    """Choose the unit of time for the longest run: its label and its length in seconds."""
    name, size = next(
        pair for pair in (("hours", 3600), ("minutes", 60), ("seconds", 1)) if seconds >= 2 * pair[1] or pair[1] == 1
    )
    return f"{name} of training steps", size


def draw_arm(
    axis: Axes, seeds: Mapping[str, pd.Series], style: Mapping[str, Any], label: str, *, common: bool,
    bounds: tuple[float, float] = (-math.inf, math.inf), thin: bool = True,
) -> None:  # fmt: skip
    """Draw an arm: each seed thin, the mean thick, and the 95% interval over seeds.

    `seeds` are values by step or time. With `common` the mean is taken at the steps that all seeds share; otherwise at
    measured times while all seeds run. The interval is cut at `bounds`. `thin=False` omits the seeds' own lines.
    """
    plain = {"color": style["color"], "ls": "-", "marker": ""}
    if len(seeds) > 1 and thin:
        for values in seeds.values():
            axis.plot(values.index, values, lw=0.5, alpha=0.4, **plain)
    x, values_S_T = _common_steps(list(seeds.values()), common or len(seeds) == 1)
    mean, low, high = band_over_seeds(values_S_T)
    if len(seeds) > 1:
        axis.fill_between(x, np.clip(low, *bounds), np.clip(high, *bounds), color=style["color"], alpha=0.13, lw=0)
    halo = [Stroke(linewidth=3.2, foreground="white"), Normal()]  # sets it off from the seeds, in grey too
    axis.plot(x, mean, label=label, markevery=max(1, len(x) // MARKS), zorder=3, path_effects=halo, **style)


def _common_steps(seeds: Sequence[pd.Series], common: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the places where all seeds have a value, and the values [seeds, places]."""
    if common:
        table = pd.concat(seeds, axis=1, join="inner").sort_index()
        return table.index.to_numpy(), table.to_numpy(float).T
    first, last = max(one.index[0] for one in seeds), min(one.index[-1] for one in seeds)
    measured = np.unique(np.concatenate([one.index for one in seeds]))
    x = measured[(first <= measured) & (measured <= last)]
    x = x if len(x) <= MOMENTS else np.linspace(first, last, MOMENTS)
    return x, np.array([np.interp(x, one.index, one) for one in seeds])


def style_panel(axis: Axes, label: str, unit: str) -> None:
    """Set the labels of a panel, plain ticks and a legend below it."""
    axis.set(xlabel=unit, ylabel=label)
    axis.tick_params(labelbottom=True)
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=unit in ("step", "stage")))  # there is no step 1.5
    axis.xaxis.set_major_formatter(format_tick)
    axis.yaxis.set_major_formatter(format_tick)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=3.7)  # in font sizes: panels vary in height
