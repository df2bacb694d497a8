"""Split the squared error of quantized weights into parts that add up: scale, dead zone, grid, method.

After "Decomposing MXFP4 quantization error for LLM reinforcement learning" (arXiv 2605.20402), which reports that grid
noise raises entropy. Only its abstract was available, so the definitions here are this lab's own. For a weight w, let
q(w) be its nearest value if block scales could be any number (`Format.ideal`), r(w) the nearest value with the format's
own scales (round to nearest), and w' the stored value. With |x|^2 the sum of squares over all weights,

    |w' - w|^2 = grid + dead + scale + method

- grid:   |q(w) - w|^2 over the weights with q(w) != 0: values move to the grid
- dead:   |w|^2 over the weights with q(w) = 0:         small values become zero
- scale:  |r(w) - w|^2 - |q(w) - w|^2:                  scales are rounded
- method: |w' - w|^2 - |r(w) - w|^2:                    AWQ or GPTQ against round to nearest; 0 for rtn

`grid` and `dead` cannot be negative. `scale` is negative if a rounding rule finds better scales than the block's
maximum (NVFP4's four_over_six), `method` if a method beats round to nearest.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats.format import Format, pack_fused
from qerl_lab.model.linear import fused_groups
from qerl_lab.model.weight_files import WeightFiles

PARTS = ("grid", "dead", "scale", "method")
FIT_ROUNDS = 4


@dataclass(frozen=True)
class LayerError:
    """Weights of one Linear before and after quantization, [N, K] in float32.

    Attributes:
        weight: the original, w in the module's text.
        ideal: rounded with exact block scales, q(w); None for a format that does not define it.
        nearest: rounded to nearest with the format's own scales, r(w).
        stored: what a checkpoint stores, dequantized, w'; without a checkpoint the same as `nearest`.
    """

    name: str
    weight: Tensor
    ideal: Tensor | None
    nearest: Tensor
    stored: Tensor

    @property
    def dead(self) -> Tensor:
        """Part of the rounding error that is of weights rounded to 0, [N, K]; 0 at all other weights."""
        assert self.ideal is not None
        return torch.where(self.ideal == 0, -self.weight, 0.0)

    @property
    def grid(self) -> Tensor:
        """Part of the rounding error that is of weights not rounded to 0, [N, K]; 0 at the weights rounded to 0."""
        assert self.ideal is not None
        return torch.where(self.ideal == 0, 0.0, self.ideal - self.weight)


def layers(
    weight_format: Format, dense: WeightFiles, packed: WeightFiles | None, linears: list[str], device: torch.device,
    *, fit_scales: bool = False,
) -> Iterator[LayerError]:  # fmt: skip
    """Yield the weights of each Linear in `linears` (full names) before and after quantization.

    `dense` holds the original weights. `packed` is a quantized checkpoint of the same model, from which the field
    `stored` is read; with None, `stored` is the weight rounded to nearest. `fit_scales` removes from `stored` the
    scales that AWQ moved into the previous layer.
    """
    for group in fused_groups(linears):
        weights = {name: dense.tensor(f"{name}.weight", device) for name in group}
        exact = {name: weight.float() for name, weight in weights.items()}
        for name, tensors in pack_fused(weight_format, weights):
            weight = exact.pop(name)
            nearest = weight_format.dequantize(tensors, (weight.shape[0], weight.shape[1]), torch.float32)
            stored = nearest if packed is None else stored_weight(weight_format, packed, name, weight, fit_scales)
            yield LayerError(name, weight, weight_format.ideal(weight), nearest, stored)


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


def sum_errors(errors: Iterable[LayerError]) -> dict[str, Any]:
    """Sum the squared weight errors of the layers, in float64.

    `relative` is |stored - weight|^2 / |weight|^2, `sqnr_db` its inverse in decibels. `parts` has the share of each of
    PARTS in |stored - weight|^2; it is None if nothing changed or the format has no ideal.
    """
    signal = error = 0.0
    parts: dict[str, float] | None = dict.fromkeys(PARTS, 0.0)
    for layer in errors:
        signal, error = signal + sum_of_squares(layer.weight), error + sum_of_squares(layer.stored - layer.weight)
        found = error_parts(layer)
        parts = None if parts is None or found is None else {part: parts[part] + found[part] for part in PARTS}
    return {
        "relative": error / signal,
        "sqnr_db": decibels(signal, error),
        "parts": {part: value / error for part, value in parts.items()} if parts and error else None,
    }


def decibels(signal: float, error: float) -> float | None:
    """Return 10 log10(signal / error); None if the error is 0 or infinite, or the signal is 0."""
    return 10 * math.log10(signal / error) if 0 < error < math.inf and signal > 0 else None


def error_parts(layer: LayerError) -> dict[str, float] | None:
    """Split one Linear's squared error into PARTS, as in the module's docstring; None if the format has no ideal."""
    if layer.ideal is None:
        return None
    grid, dead = sum_of_squares(layer.grid), sum_of_squares(layer.dead)
    nearest, stored = sum_of_squares(layer.nearest - layer.weight), sum_of_squares(layer.stored - layer.weight)
    return {"grid": grid, "dead": dead, "scale": nearest - grid - dead, "method": stored - nearest}


def sum_of_squares(values: Tensor) -> float:
    """Return the sum of squares of a tensor in float64."""
    return values.double().square().sum().item()
