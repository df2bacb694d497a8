"""Compare weight formats in one figure: reward, entropy and held-out accuracy by step, with intervals over seeds."""

from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qerl_lab.report import palette
from qerl_lab.report.arms import spelled
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.curves import CURVES, STYLE, Curve, draw_arm, seeds_of
from qerl_lab.report.palette import tick
from qerl_lab.report.printed_arms import PLAIN

FEWEST = 2  # formats needed for a comparison
# Settings of a format's plain arm: no noise, no other exploration, no other scale rule.
IS_PLAIN = {"aqn.schedule": "off"} | {key: value for key, value in PLAIN.items() if key != "lora.rank"}


def groups(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Group arms that differ only in weight format, titled by the settings that set the group apart.

    A group maps each format, at least `FEWEST` and the dense one first, to the label of its plain arm.
    """
    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for label, records in comparison.arms.items():
        settings = dict(records[0].run.arm)  # identifies a local model by content, not by path
        if IS_PLAIN.items() <= settings.items():
            others = tuple(sorted((key, value) for key, value in settings.items() if not key.startswith("format.")))
            found.setdefault(others, {}).setdefault(settings["format.name"], label)
    found = {others: formats for others, formats in found.items() if len(formats) >= FEWEST}
    shared = set.intersection(*map(set, found)) if found else set()
    order = list(palette.FORMATS)
    return {
        ", ".join(spelled(*setting) for setting in others if setting not in shared):
            {name: formats[name] for name in sorted(formats, key=order.index)}
        for others, formats in found.items()
    }  # fmt: skip


def draw(points: pd.DataFrame, formats: Mapping[str, str], title: str) -> Figure:
    """Draw panels side by side with a line per format; metrics that no run recorded have no panel.

    The caller closes the figure.

    Args:
        points: tidy, from `comparison.curves`.
        formats: the label of each format's arm, from `groups`.
    """
    chosen = points[points["arm"].isin(formats.values()) & points["value"].notna()]
    shown = _shown(set(chosen["metric"]))
    styles = palette.styles({label: name for name, label in formats.items()})
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(1, len(shown), figsize=(4.4 * len(shown), 3.9), squeeze=False)
        for axis, curve in zip(axes.flat, shown, strict=True):
            of_curve = chosen[chosen["metric"] == curve.metric]
            for name, label in formats.items():
                if seeds := seeds_of(of_curve[of_curve["arm"] == label]):
                    draw_arm(axis, seeds, styles[label], f"{name} (n={len(seeds)})", common=True,
                             bounds=curve.bounds, thin=False)  # fmt: skip
            axis.set_title(curve.title, loc="left")
            axis.set(xlabel="step", ylabel=curve.label)
            axis.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            axis.yaxis.set_major_formatter(tick)
        figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(formats))
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _shown(recorded: set[str]) -> Sequence[Curve]:
    """Choose reward, the trainer's entropy and held-out accuracy (during training if measured, else at both ends)."""
    of = {curve.name: curve for curve in CURVES}
    accuracy = "subset_accuracy" if of["subset_accuracy"].metric in recorded else "accuracy"
    return [of[name] for name in ("reward", "entropy", accuracy) if of[name].metric in recorded]
