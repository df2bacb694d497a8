"""Signal-to-quantization-noise ratio of every packed Linear: 10 log10(sum w^2 / sum (w - w')^2)."""

import math
from typing import Any, NamedTuple

import torch

from qerl_lab import terminal
from qerl_lab.evaluate.weight_error import without_scales
from qerl_lab.formats.format import Format
from qerl_lab.model.files import WeightFiles

LOWEST = 5


class Layer(NamedTuple):
    """One packed Linear: sums of squares of its weight and its rounding error, weight count, bytes of its tensors."""

    name: str
    signal: float
    error: float
    weights: int
    bytes: int

    @property
    def sqnr_db(self) -> float:
        return decibels(self.signal, self.error)


def decibels(signal: float, error: float) -> float:
    """Return 10 log10(signal / error); infinite without an error."""
    return 10 * math.log10(signal / error) if error > 0 < signal else math.inf


def measure(
    weight_format: Format, dense: WeightFiles, packed: WeightFiles, linears: list[str], device: torch.device,
    *, fit_scales: bool,
) -> list[Layer]:  # fmt: skip
    """Compare the packed Linears with the dense ones, one at a time; `fit_scales` as in `measure_layer`."""
    sizes = {name: dense.bytes(f"{name}.weight") for name in linears}
    layers = []
    with terminal.Amount("comparing weights", sum(sizes.values())) as bar:
        for name in linears:
            layers.append(measure_layer(weight_format, dense, packed, name, device, fit_scales=fit_scales))
            bar.advance(sizes[name])
    return layers


def measure_layer(
    weight_format: Format, dense: WeightFiles, packed: WeightFiles, name: str, device: torch.device,
    *, fit_scales: bool,
) -> Layer:  # fmt: skip
    """Compare one Linear: differences in float32, sums in float64.

    AWQ moves scales from a layer to the one before it. `fit_scales` fits and removes them first. Raises ValueError,
    naming file and Linear, if a weight is NaN, infinite, or too large to square in float32.
    """
    weight = dense.tensor(f"{name}.weight", device).float()
    rows, columns = weight.shape
    parts = {key: packed.tensor(f"{name}.{key}", device) for key in weight_format.layout((rows, columns))}
    where = packed.where(f"{name}.{next(iter(parts))}")
    accepted = weight_format.accept(parts, (rows, columns), name=f"{where}: {name}")
    other = weight_format.dequantize(accepted, (rows, columns), torch.float32)
    if fit_scales:
        other = without_scales(weight, other)
    signal, error = (part.square().sum(dtype=torch.float64).item() for part in (weight, weight - other))
    if not math.isfinite(error):
        file = where if math.isfinite(signal) else dense.where(f"{name}.weight")
        raise ValueError(f"{file}: {name} has weights that are NaN, infinite or above 1e19: it has no SQNR")
    return Layer(name, signal, error, weight.numel(), sum(part.nbytes for part in parts.values()))


def summary(layers: list[Layer], *, fit_scales: bool) -> dict[str, Any]:
    """Return SQNR of the whole, of every layer, and the lowest layers for quality.json; null means infinite."""
    values = {layer.name: layer.sqnr_db if math.isfinite(layer.sqnr_db) else None for layer in layers}
    ranked = sorted(layers, key=lambda layer: layer.sqnr_db)
    whole = decibels(sum(layer.signal for layer in layers), sum(layer.error for layer in layers))
    return {
        "all": whole if math.isfinite(whole) else None,
        "lowest": [{"layer": layer.name, "db": values[layer.name]} for layer in ranked[:LOWEST]],
        "scales_fitted": fit_scales,
        "layers": values,
    }
