"""The error of quantized weights against a direct computation in float64."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qerl_lab.formats import Fp8, Mxfp4, Nf4, Nvfp4
from qerl_lab.formats.format import Format
from qerl_lab.model import weight_error
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.weight_files import WeightFiles

FORMATS = [Nvfp4("max"), Nvfp4("four_over_six"), Mxfp4("round"), Mxfp4("ceil"), Nf4(True), Nf4(False), Fp8("auto")]


def made(weight_format, seed: int = 0) -> tuple[Tensor, Tensor]:
    weight = 0.05 * torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) ** 3
    return weight, weight_format.dequantize(weight_format.quantize(weight), (64, 128), torch.float32)


def test_squares_are_summed_in_float64_and_decibels_need_positive_finite_sums() -> None:
    assert weight_error.sum_of_squares(torch.tensor([1e25])) == pytest.approx(1e50)
    assert weight_error.decibels(100.0, 1.0) == pytest.approx(20)
    assert [weight_error.decibels(*pair) for pair in ((1.0, 0.0), (1.0, math.inf), (0.0, 1.0))] == [None] * 3


def write(folder: Path, **weights: Tensor) -> WeightFiles:
    save_file({f"{name}.weight": weight for name, weight in weights.items()}, folder / "model.safetensors")
    return WeightFiles(folder)


def layer(weight_format: Format, weight: Tensor) -> PackedLinear:
    return PackedLinear(nn.Linear(128, 64, device="meta"), weight_format, weight_format.quantize(weight))


@pytest.mark.parametrize("weight_format", FORMATS, ids=repr)
def test_the_error_is_over_all_packed_layers_against_the_files(weight_format, tmp_path: Path) -> None:
    (one, one_stored), (packed, other_stored) = made(weight_format), made(weight_format, 1)
    other = packed + 1e-4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(9))  # as after calibration
    layers = {"one": layer(weight_format, one), "other": layer(weight_format, packed)}
    found = weight_error.of_layers(layers, write(tmp_path, one=one, other=other))
    whole = torch.cat([one_stored - one, other_stored - other]).double().square().sum()
    signal = torch.cat([one, other]).double().square().sum()
    assert found["relative"] == pytest.approx((whole / signal).item())
    assert found["sqnr_db"] == pytest.approx(10 * torch.log10(signal / whole).item())


def test_an_error_of_zero_has_no_decibels(tmp_path: Path) -> None:
    _, stored = made(Nvfp4("max"))
    again = Nvfp4("max").quantize(stored)
    exact = Nvfp4("max").dequantize(again, (64, 128), torch.float32)
    found = weight_error.of_layers({"m": layer(Nvfp4("max"), stored)}, write(tmp_path, m=exact))
    assert found == {"relative": 0, "sqnr_db": None}


def test_scales_moved_between_layers_are_fitted_on_request(tmp_path: Path) -> None:
    weight, _ = made(Nvfp4("max"))
    scaled, dense = {"m": layer(Nvfp4("max"), weight * torch.linspace(1, 4, 128))}, write(tmp_path, m=weight)
    as_stored, fitted = (weight_error.of_layers(scaled, dense, fit_scales=fits)["relative"] for fits in (False, True))
    assert as_stored > 1 > 0.1 > fitted
