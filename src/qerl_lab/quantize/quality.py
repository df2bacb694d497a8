"""Measure a quantized checkpoint: bits, sizes and SQNR of every layer.

All methods are measured the same way, tensor by tensor from the files. docs/quantize.md describes `quality.json`.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qerl_lab import formats
from qerl_lab.config.records import QUALITY
from qerl_lab.formats.format import Format
from qerl_lab.model import weight_error
from qerl_lab.model.weight_files import WeightFiles, lab_records
from qerl_lab.quantize.quantize_options import CALIBRATION, QuantizeOptions
from qerl_lab.record.environment import environment
from qerl_lab.system import terminal
from qerl_lab.system.disk import replace_file, strict_json

SCHEMA = 2  # 1 also had `kl`
LOWEST = 5  # layers named in the table


def measure(
    options: QuantizeOptions, source: Path, linears: list[str], folder: Path, device: torch.device
) -> dict[str, Any]:
    """Compare the checkpoint in `folder` with the dense model in `source`; return the content of quality.json.

    Writes quality.json to `folder`. `linears` are the names of the packed Linears.
    """
    started = time.time()
    dense, packed = WeightFiles(source), WeightFiles(folder)
    fit_scales, is_calibrated = options.method == "awq", options.method != "rtn"
    weight_format = formats.build(options.format_config())
    sizes = {name: dense.bytes(f"{name}.weight") for name in linears}
    layers = {}
    with terminal.ProgressBar("comparing weights", sum(sizes.values())) as bar:
        for name in linears:
            layers[name] = measure_layer(weight_format, dense, packed, name, device, fit_scales=fit_scales)
            bar.advance(sizes[name])
    before = sum(dense.bytes(name) for name in dense.names)
    after = sum(packed.bytes(name) for name in packed.names)
    count = sum(math.prod(dense.shape(name)) for name in dense.names)
    shapes = [dense.shape(f"{name}.weight") for name in linears]
    in_linears, in_packed = sum(map(math.prod, shapes)), sum(weight_format.packed_bytes(*shape) for shape in shapes)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "model": options.model, "revision": options.revision, "format": options.format, "method": options.method,
        "ignore": options.ignore, "options": asdict(weight_format), "began_from": lab_records(source),
        "calibration": {key: getattr(options, key) for key in CALIBRATION} if is_calibrated else None,
        "weights": {"all": count, "quantized": in_linears},
        "bytes": {"before": before, "after": after},
        "bits_per_weight": {
            "quantized": in_packed * 8 / in_linears, "model": after * 8 / count,
        },
        "sqnr_db": sqnr_summary(layers) | {"scales_fitted": fit_scales},
    }  # fmt: skip
    result |= {"device": device.type, "seconds": round(time.time() - started, 1), "environment": environment()}
    replace_file(folder / QUALITY, strict_json(result))
    return result


def measure_layer(
    weight_format: Format, dense: WeightFiles, packed: WeightFiles, name: str, device: torch.device,
    *, fit_scales: bool,
) -> tuple[float, float]:  # fmt: skip
    """Return the sums of squares of the Linear `name`'s weight in `dense`, and of its rounding error in `packed`.

    `fit_scales` is explained at `weight_error.of_layer`. Raises ValueError, naming file and Linear, if a weight is NaN,
    infinite or too large, or for packed tensors that `Format.accept` refuses.
    """
    weight = dense.tensor(f"{name}.weight", device).float()
    shape = (weight.shape[0], weight.shape[1])
    parts = {key: packed.tensor(f"{name}.{key}", device) for key in weight_format.layout(shape)}
    file = packed.where(f"{name}.{next(iter(parts))}")
    parts = weight_format.accept(parts, shape, name=f"{file}: {name}")
    stored = weight_format.dequantize(parts, shape, torch.float32)
    signal, error = weight_error.of_layer(weight, stored, fit_scales=fit_scales)
    if not math.isfinite(error):
        at_fault = file if math.isfinite(signal) else dense.where(f"{name}.weight")
        raise ValueError(f"{at_fault}: {name} has weights that are NaN, infinite or too large: it has no SQNR")
    return signal, error


def sqnr_summary(layers: Mapping[str, tuple[float, float]]) -> dict[str, Any]:
    """Return the signal-to-quantization-noise ratio, in dB, of all weights, of each layer, and of the lowest layers.

    None stands for infinite, or undefined for zeros. `layers` has the result of `measure_layer` by layer name.
    """
    levels = {name: weight_error.decibels(signal, error) for name, (signal, error) in layers.items()}
    ranked = sorted(levels, key=lambda name: math.inf if (level := levels[name]) is None else level)
    signals, errors = zip(*layers.values(), strict=True)
    return {
        "all": weight_error.decibels(sum(signals), sum(errors)),
        "lowest": [{"layer": name, "db": levels[name]} for name in ranked[:LOWEST]],
        "layers": levels,
    }


def table(options: QuantizeOptions, result: dict[str, Any]) -> str:
    """Return a table of a checkpoint's quality to print, from the `result` that `measure` returned."""

    def decibel(value: float | None) -> str:
        return "inf dB" if value is None else f"{value:.2f} dB"

    weights, sizes, bits, levels = (result[key] for key in ("weights", "bytes", "bits_per_weight", "sqnr_db"))
    fitted = ", after the scales that AWQ moves" if levels["scales_fitted"] else ""
    how = f"to {options.format} by {options.method}"
    rows = [
        ("quantized", f"{weights['quantized']:,} of {weights['all']:,} weights {how}"),
        ("bits per weight", f"{bits['quantized']:.3f} where quantized, {bits['model']:.3f} over the whole model"),
        ("size", " -> ".join(tqdm.format_sizeof(size, "B") for size in sizes.values())),
        ("SQNR", f"{decibel(levels['all'])} over all weights{fitted}; the lowest:"),
        *((f"  {decibel(layer['db'])}", layer["layer"]) for layer in levels["lowest"]),
    ]
    return terminal.aligned(rows)
