"""Plot weight formats and noise from the tables of evaluate/codec.py and evaluate/effects.py."""

from collections.abc import Mapping, Sequence
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qerl_lab.report import palette

MARKS = "osD^v<>"


def values_of_a_block(values: Mapping[str, Sequence[float]]) -> Figure:
    """Plot, a row per format, the values that a weight can take within its block."""
    figure, axis = plt.subplots(figsize=(8, 0.7 + 0.45 * len(values)), layout="constrained")
    for row, (name, found) in enumerate(values.items()):
        axis.plot(found, [row] * len(found), "|", ms=16, mew=1.8, color=_color(name, row))
    axis.set_yticks(range(len(values)), [f"{name}, {len(found)} values" for name, found in values.items()])
    axis.set_ylim(len(values) - 0.4, -0.6)
    axis.set_xlabel("weight, in units of the largest of its block")
    return _dressed(figure, axis, grid="x")


def largest_of_blocks(stored: Mapping[str, Sequence[float]]) -> Figure:
    """Plot a histogram per format of stored over exact, for the largest weight of each block; 1 is exact."""
    figure, axes = plt.subplots(
        1, len(stored), figsize=(3 * len(stored), 2.6), layout="constrained", sharex=True, squeeze=False
    )
    for number, (axis, (name, found)) in enumerate(zip(axes.flat, stored.items(), strict=True)):
        axis.hist(found, bins=40, range=(0.75, 1.25), color=_color(name, number))
        axis.axvline(1, color="0.3", lw=0.8)
        axis.set(title=name, xlabel="stored / exact", yticks=[])
        _dressed(figure, axis, grid="x")
    axes.flat[0].set_ylabel("blocks")
    return figure


def noise_and_formats(noise: pd.DataFrame, formats: pd.DataFrame) -> Figure:
    """Compare noise with formats: left KL by sigma, right entropy by KL.

    The left panel has a point per noise draw and a horizontal line per format. The right panel has the mean and the
    draws of each sigma, and each format with its 95% interval.

    Args:
        noise: from `effects.of_noise`.
        formats: from `effects.of_formats`, packed formats only.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    means = noise.groupby("sigma").mean()
    for axis, x in ((left, "sigma"), (right, "kl")):
        y = "kl" if axis is left else "entropy_change"
        axis.plot(noise[x], noise[y], ".", color="0.6", ms=4, label="noise, each draw")
        axis.plot(means.index if x == "sigma" else means[x], means[y], "-", color="0.2", lw=1.4, label="noise, mean")
        axis.set_xscale("log")
    left.set_xticks(means.index, [f"{sigma:g}" for sigma in means.index])
    left.set_xticks([], minor=True)
    for row, (name, effect) in enumerate(formats.iterrows()):
        style = {"color": _color(str(name), row), "label": name}
        left.axhline(effect["kl"], ls=("--", ":", "-.")[row % 3], lw=1.4, **style)
        ends = [[effect["entropy_change"] - effect["change_low"]], [effect["change_high"] - effect["entropy_change"]]]
        right.errorbar(
            effect["kl"], effect["entropy_change"], yerr=ends, fmt=MARKS[row % len(MARKS)], capsize=3, **style
        )
    left.set(xlabel="sigma", ylabel="KL to the dense policy, nats per token", yscale="log")
    right.axhline(0, color="0.7", lw=0.8)
    right.set(xlabel="KL to the dense policy, nats per token", ylabel="change of entropy, nats per token")
    for axis in (left, right):
        axis.legend(frameon=False, fontsize="small", loc="upper left")
        _dressed(figure, axis, grid="both")
    return figure


def _color(name: str, number: int) -> str:
    """Return the color of a format of the lab, or an unused color for another one."""
    return palette.FORMATS.get(name, palette.OTHERS[number % len(palette.OTHERS)])


def _dressed(figure: Figure, axis: Axes, grid: Literal["both", "x", "y"]) -> Figure:
    axis.grid(alpha=0.25, axis=grid)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
