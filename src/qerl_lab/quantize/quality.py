"""Measure a quantized checkpoint: bits, sizes, SQNR of every layer, and KL to the original model.

All methods are measured the same way, from the files: weights tensor by tensor, then both models one after the other on
the same text. docs/quantize.md describes `quality.json`.
"""

import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from qerl_lab import formats, terminal
from qerl_lab.config.records import QUALITY
from qerl_lab.disk import replace_file, strict_json
from qerl_lab.model.files import WeightFiles, noted
from qerl_lab.quantize import divergence, sqnr
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.record.environment import environment
from qerl_lab.report import plots

SCHEMA = 1


def measure(
    options: QuantizeOptions, source: Path, linears: list[str], folder: Path, device: torch.device
) -> dict[str, Any]:
    """Compare the checkpoint in `folder` with the dense `source`; write quality.json and sqnr.png there."""
    started = time.time()
    dense, packed, fit_scales = WeightFiles(source), WeightFiles(folder), options.method == "awq"
    weight_format = formats.build(options.format_config())
    layers = sqnr.measure(weight_format, dense, packed, linears, device, fit_scales=fit_scales)
    before, after = (sum(files.bytes(name) for name in files.names) for files in (dense, packed))
    count = sum(torch.Size(dense.shape(name)).numel() for name in dense.names)
    in_linears = sum(layer.weights for layer in layers)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "model": options.model, "revision": options.revision, "format": options.format, "method": options.method,
        "ignore": options.ignore, "options": asdict(weight_format), "began_from": noted(source),
        "calibration": None if options.method == "rtn" else
        {"dataset": options.dataset, "samples": options.samples, "tokens": options.tokens, "seed": options.seed},
        "weights": {"all": count, "quantized": in_linears},
        "bytes": {"before": before, "after": after},
        "bits_per_weight": {
            "quantized": sum(layer.bytes for layer in layers) * 8 / in_linears, "model": after * 8 / count,
        },
        "sqnr_db": sqnr.summary(layers, fit_scales=fit_scales),
        "kl": divergence.compare(options, source, folder, count, device) if options.quality == "full" else None,
    }  # fmt: skip
    result |= {"device": device.type, "seconds": round(time.time() - started, 1), "environment": environment()}
    title = f"{Path(options.model).name}, {options.format} by {options.method}"
    plots.save_sqnr(result["sqnr_db"]["layers"], title, folder / "sqnr.png")
    replace_file(folder / QUALITY, strict_json(result))
    return result


def table(options: QuantizeOptions, result: dict[str, Any]) -> str:
    """Return the lines that the command prints at its end."""
    weights, sizes, bits, levels = (result[key] for key in ("weights", "bytes", "bits_per_weight", "sqnr_db"))
    fitted = ", after the scales that AWQ moves" if levels["scales_fitted"] else ""
    how = f"to {options.format} by {options.method}"
    rows = [
        ("quantized", f"{weights['quantized']:,} of {weights['all']:,} weights {how}"),
        ("bits per weight", f"{bits['quantized']:.3f} where quantized, {bits['model']:.3f} over the whole model"),
        ("size", " -> ".join(tqdm.format_sizeof(size, "B") for size in sizes.values())),
        ("SQNR", f"{_db(levels['all'])} over all weights{fitted}; the lowest:"),
        *((f"  {_db(layer['db'])}", layer["layer"]) for layer in levels["lowest"]),
        *_kl_rows(result["kl"]),
    ]
    return terminal.aligned(rows)


def _db(value: float | None) -> str:
    return "inf dB" if value is None else f"{value:.2f} dB"


def _kl_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None or "skipped" in found:
        return [("KL, entropy", f"not measured: {found['skipped'] if found else 'quality=weights'}")]
    if not math.isfinite(found["nats_per_token"]):
        return [("KL to the original", "not finite: logits of the checkpoint are NaN or infinite (null in the file)")]
    error = "" if found["standard_error"] is None else f" +- {found['standard_error']:.5f}"
    return [
        ("KL to the original", f"{found['nats_per_token']:.5f}{error} nats per token over {found['tokens']} tokens"),
        ("entropy", f"{found['entropy_original']:.4f} -> {found['entropy_quantized']:.4f} nats per token"),
    ]
