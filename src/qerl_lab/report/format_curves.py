"""Compare weight formats in one figure: reward, entropy and held-out accuracy by step, with intervals over seeds."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from qerl_lab.report import palette
from qerl_lab.report.arms import format_setting
from qerl_lab.report.comparison import Comparison
from qerl_lab.report.curves import CURVES, side_by_side
from qerl_lab.report.printed_arms import PLAIN

FEWEST = 2  # formats needed for a comparison
# Settings of a format's plain arm: no noise, no other exploration, no other scale rule.
IS_PLAIN = {"aqn.schedule": "off"} | {key: value for key, value in PLAIN.items() if key != "lora.rank"}


def group_formats(comparison: Comparison) -> dict[str, dict[str, str]]:
    """Group arms that differ only in weight format: title of the group -> format -> label of its arm.

    The largest groups come first; groups of fewer than `FEWEST` formats are left out. A group maps each format, the
    dense one first, to the label of its arm that meets `IS_PLAIN`.
    """
    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for label, records in comparison.arms.items():
        settings = dict(records[0].run.arm)  # identifies a local model by content, not by path
        if IS_PLAIN.items() <= settings.items():
            others = tuple(sorted((key, value) for key, value in settings.items() if not key.startswith("format.")))
            found.setdefault(others, {}).setdefault(settings["format.name"], label)
    several = [(others, formats) for others, formats in found.items() if len(formats) >= FEWEST]
    found = dict(sorted(several, key=lambda group: -len(group[1])))  # a page shows the first few
    shared = set.intersection(*map(set, found)) if found else set()
    order = list(palette.FORMATS)
    return {
        ", ".join(format_setting(*setting) for setting in others if setting not in shared):
            {name: formats[name] for name in sorted(formats, key=order.index)}
        for others, formats in found.items()
    }  # fmt: skip


def draw(points: pd.DataFrame, formats: Mapping[str, str], title: str) -> Figure:
    """Draw reward, the trainer's entropy and held-out accuracy, a line per format; the caller closes the figure.

    Metrics that no run recorded have no panel. Accuracy is that during training if it was measured, else at both ends.

    Args:
        points: tidy, from `comparison.curves`.
        formats: the label of each format's arm, from `group_formats`.
    """
    recorded = set(points.loc[points["arm"].isin(formats.values()) & points["value"].notna(), "metric"])
    of = {curve.name: curve for curve in CURVES}
    accuracy = "subset_accuracy" if of["subset_accuracy"].metric in recorded else "accuracy"
    shown = [of[name] for name in ("reward", "entropy", accuracy) if of[name].metric in recorded]
    labels = {label: name for name, label in formats.items()}
    return side_by_side(points, shown, labels, palette.styles(labels), title)
