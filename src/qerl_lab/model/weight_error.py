"""Measure the squared error that quantization leaves in weights, of a checkpoint or of rounding to nearest."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.weight_files import WeightFiles

FIT_ROUNDS = 4


def of_layers(
    packed: Mapping[str, PackedLinear], dense: WeightFiles, *, fit_scales: bool = False
) -> dict[str, float | None]:
    """Return the squared error of all `packed` layers together, against their weights in the files `dense`.

    The entry `relative` is |stored - weight|^2 / |weight|^2. The entry `sqnr_db` is its inverse in decibels, or None as
    in `decibels`. `of_layer` explains `fit_scales`.
    """
    signal = error = 0.0
    for name, layer in packed.items():
        weight = dense.tensor(f"{name}.weight", layer.weight.device).float()
        stored = layer.weight_format.dequantize(layer.packed(), (layer.out_features, layer.in_features), torch.float32)
        squares = of_layer(weight, stored, fit_scales=fit_scales)
        signal, error = signal + squares[0], error + squares[1]
    return {"relative": error / signal, "sqnr_db": decibels(signal, error)}


def of_layer(weight: Tensor, stored: Tensor, *, fit_scales: bool) -> tuple[float, float]:
    """Return the sums of squares of `weight[N, K]` and of its rounding error `stored - weight`, in float64.

    `stored[N, K]` is the packed weight, dequantized. `fit_scales` first scales the rows and columns of `stored` to fit
    `weight`, because AWQ moves scales from one layer into another.
    """
    if fit_scales:
        stored = remove_scales(weight, stored)
    return sum_of_squares(weight), sum_of_squares(stored - weight)


def remove_scales(weight: Tensor, other: Tensor) -> Tensor:
    """Return `other[N, K]` with columns and rows scaled in turn, FIT_ROUNDS times, to fit `weight` in least squares."""
    for dim in (0, 1) * FIT_ROUNDS:
        product, square = (weight * other).sum(dim, keepdim=True), other.square().sum(dim, keepdim=True)
        other = other * torch.where(square > 0, product / square, 1.0)
    return other


def decibels(signal: float, error: float) -> float | None:
    """Return 10 log10(signal / error); None if the error is 0 or infinite, or the signal is 0."""
    return 10 * math.log10(signal / error) if 0 < error < math.inf and signal > 0 else None


def sum_of_squares(values: Tensor) -> float:
    """Return the sum of squares of a tensor in float64."""
    return values.double().square().sum().item()
