"""The error of quantized weights against a direct computation in float64, and which weights are compared."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from qerl_lab.evaluate import weight_error
from qerl_lab.formats import Fp8, Mxfp4, Nf4, Nvfp4
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.weight_files import WeightFiles

FORMATS = [Nvfp4("max"), Nvfp4("four_over_six"), Mxfp4("round"), Mxfp4("ceil"), Nf4(True), Nf4(False), Fp8("auto")]


def made(weight_format, seed: int = 0) -> tuple[Tensor, Tensor]:
    weight = 0.05 * torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) ** 3
    return weight, weight_format.dequantize(weight_format.quantize(weight), (64, 128), torch.float32)


def test_squares_are_summed_in_float64_and_no_ratio_without_both_has_decibels() -> None:
    assert weight_error.sum_of_squares(torch.tensor([1e25])) == pytest.approx(1e50)
    assert weight_error.decibels(100.0, 1.0) == pytest.approx(20)
    assert [weight_error.decibels(*pair) for pair in ((1.0, 0.0), (1.0, math.inf), (0.0, 1.0))] == [None] * 3


@pytest.mark.parametrize("weight_format", FORMATS, ids=repr)
def test_the_error_is_that_of_all_layers_together(weight_format) -> None:
    noise = 1e-4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(9))
    other, stored = made(weight_format, 1)
    layers = [made(weight_format), (other, stored + noise)]
    found = weight_error.sum_errors(layers)
    whole = torch.cat([stored - weight for weight, stored in layers]).double().square().sum()
    signal = torch.cat([weight for weight, _ in layers]).double().square().sum()
    assert found["relative"] == pytest.approx((whole / signal).item())
    assert found["sqnr_db"] == pytest.approx(10 * torch.log10(signal / whole).item())


def test_without_an_error_there_are_no_decibels() -> None:
    weight, _ = made(Nvfp4("max"))
    assert weight_error.sum_errors([(weight, weight)]) == {"relative": 0, "sqnr_db": None}


def test_a_packed_layer_is_compared_with_the_dense_weight_in_the_files(tmp_path) -> None:
    weight_format, generator = Nvfp4("max"), torch.Generator().manual_seed(0)
    dense, other = (torch.randn(16, 32, generator=generator) for _ in range(2))
    save_file({"m.q_proj.weight": dense}, tmp_path / "model.safetensors")
    layer = PackedLinear(nn.Linear(32, 16, device="meta"), weight_format, weight_format.quantize(other))
    ((weight, stored),) = weight_error.layers({"m.q_proj": layer}, WeightFiles(tmp_path))
    assert torch.equal(weight, dense)
    assert torch.equal(stored, weight_format.dequantize(weight_format.quantize(other), (16, 32), torch.float32))
