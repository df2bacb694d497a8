"""Measure the squared error that quantization leaves in weights, of a checkpoint or of rounding to nearest."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_lab.formats.format import Format
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.weight_files import WeightFiles

FIT_ROUNDS = 4


def of_layers(
    packed: Mapping[str, PackedLinear], dense: WeightFiles, *, fit_scales: bool = False
) -> dict[str, float | None]:
    """Sum the squared errors of the packed layers of a model against the weights in the files `dense`, in float64.

    Returns `relative`, |stored - weight|^2 / |weight|^2, and `sqnr_db`, its inverse in decibels. `fit_scales` first
    removes from the packed weights the scales that AWQ moved into the previous layer.
    """
    signal = error = 0.0
    for name, layer in packed.items():
        weight = dense.tensor(f"{name}.weight", layer.weight.device).float()
        stored = layer.weight_format.dequantize(layer.packed(), (layer.out_features, layer.in_features), torch.float32)
        if fit_scales:
            stored = remove_scales(weight, stored)
        signal, error = signal + sum_of_squares(weight), error + sum_of_squares(stored - weight)
    return {"relative": error / signal, "sqnr_db": decibels(signal, error)}


def stored_weight(weight_format: Format, packed: WeightFiles, name: str, weight: Tensor, fit_scales: bool) -> Tensor:
    """Return the weight of the Linear `name` in a packed checkpoint, dequantized: float32 [N, K].

    `weight[N, K]` is the original weight; the result has its device, and is scaled to fit it if `fit_scales` is set
    (see `remove_scales`). Raises ValueError, naming file and tensor, for tensors that `Format.accept` refuses.
    """
    shape = (weight.shape[0], weight.shape[1])
    parts = {key: packed.tensor(f"{name}.{key}", weight.device) for key in weight_format.layout(shape)}
    where = packed.where(f"{name}.{next(iter(parts))}")
    parts = weight_format.accept(parts, shape, name=f"{where}: {name}")
    stored = weight_format.dequantize(parts, shape, torch.float32)
    return remove_scales(weight, stored) if fit_scales else stored


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
