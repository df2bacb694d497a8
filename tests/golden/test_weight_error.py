"""The parts of a weight's error against a direct computation in float64, and that they add up."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qerl_lab.evaluate import weight_error
from qerl_lab.evaluate.weight_error import PARTS, LayerError
from qerl_lab.formats import Bf16, Fp8, Mxfp4, Nf4, Nvfp4
from qerl_lab.model.weight_files import WeightFiles
from reference_formats import QLORA_TABLE, e4m3_values

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
GRIDS = {
    "nvfp4": np.concatenate([-E2M1[:0:-1], E2M1]) / 6,
    "mxfp4": np.concatenate([-E2M1[:0:-1], E2M1]) / 6,
    "nf4": np.array(QLORA_TABLE),
    "fp8": np.concatenate([e4m3_values()[254:128:-1], e4m3_values()[:127]]) / 448,
}
FORMATS = [Nvfp4("max"), Nvfp4("four_over_six"), Mxfp4("round"), Mxfp4("ceil"), Nf4(True), Nf4(False), Fp8("auto")]


def made(weight_format, seed: int = 0, stored: torch.Tensor | None = None) -> LayerError:
    weight = 0.05 * torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) ** 3
    nearest = weight_format.dequantize(weight_format.quantize(weight), (64, 128), torch.float32)
    return LayerError("a", weight, weight_format.ideal(weight), nearest, nearest if stored is None else stored)


def nearest_of(grid: np.ndarray, weight: np.ndarray, block: int) -> np.ndarray:
    """Each weight's nearest grid value times the largest magnitude of its block, in float64."""
    blocks = weight.reshape(-1, block)
    scale = np.abs(blocks).max(1, keepdims=True)
    choices = grid[None, None, :] * scale[:, :, None]
    index = np.abs(blocks[:, :, None] - choices).argmin(-1)
    return np.take_along_axis(choices, index[:, :, None], -1)[:, :, 0].reshape(weight.shape)


@pytest.mark.parametrize("weight_format", FORMATS, ids=repr)
def test_the_parts_are_those_of_a_direct_computation(weight_format) -> None:
    layer = made(weight_format)
    weight = layer.weight.double().numpy()
    ideal = nearest_of(GRIDS[weight_format.NAME], weight, weight_format.BLOCK or weight.shape[1])
    assert np.abs(ideal - layer.ideal.numpy()).max() < 1e-6 * np.abs(weight).max()
    dead, error = ideal == 0, layer.nearest.double().numpy() - weight
    grid = ((ideal - weight)[~dead] ** 2).sum()
    expected = {"grid": grid, "dead": (weight[dead] ** 2).sum(), "method": 0.0}
    expected["scale"] = (error**2).sum() - expected["grid"] - expected["dead"]
    found = weight_error.error_parts(layer)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6 * (error**2).sum())
    assert (layer.dead + layer.grid).numpy() == pytest.approx(ideal - weight, abs=1e-6)


@pytest.mark.parametrize("weight_format", FORMATS, ids=repr)
def test_shares_add_up_to_one(weight_format) -> None:
    noise = 1e-4 * torch.randn(64, 128, generator=torch.Generator().manual_seed(9))
    layers = [made(weight_format), made(weight_format, 1, stored=made(weight_format, 1).nearest + noise)]
    found = weight_error.sum_errors(layers)
    assert tuple(found["parts"]) == PARTS
    assert sum(found["parts"].values()) == pytest.approx(1, abs=1e-12)
    whole = torch.cat([layer.stored - layer.weight for layer in layers]).double().square().sum()
    signal = torch.cat([layer.weight for layer in layers]).double().square().sum()
    assert found["relative"] == pytest.approx((whole / signal).item())
    assert found["sqnr_db"] == pytest.approx(10 * torch.log10(signal / whole).item())
    assert abs(found["parts"]["method"]) > 0


def test_what_is_all_dead_is_all_dead() -> None:
    """A block of a large weight and small ones."""
    weight = torch.full((1, 16), 0.01)
    weight[0, 0] = 6.0
    weight_format = Nvfp4("max")
    nearest = weight_format.dequantize(weight_format.quantize(weight), (1, 16), torch.float32)
    found = weight_error.sum_errors([LayerError("a", weight, weight_format.ideal(weight), nearest, nearest)])
    assert found["parts"]["dead"] == pytest.approx(1, abs=1e-6)
    assert weight_format.ideal(torch.zeros(1, 16)).eq(0).all()


@dataclass(frozen=True)
class Silent(Bf16):
    """A format that does not say how it would round ideally."""

    NAME: ClassVar[str] = "silent"

    def ideal(self, weight: torch.Tensor) -> None:
        return None


def test_without_an_ideal_and_without_an_error_there_are_no_parts() -> None:
    found = weight_error.sum_errors([made(Silent())])
    assert found["parts"] is None
    assert found["relative"] > 0
    layer = made(Nvfp4("max"))
    same = weight_error.sum_errors([replace(layer, nearest=layer.weight, stored=layer.weight)])
    assert (same["relative"], same["sqnr_db"], same["parts"]) == (0, None, None)


def test_what_a_method_wrote_is_read_from_its_files(tmp_path) -> None:
    """And a fused layer has one global scale, as where it is packed."""
    generator = torch.Generator().manual_seed(0)
    names = ["m.q_proj", "m.k_proj"]
    dense = {f"{name}.weight": torch.randn(16, 32, generator=generator) * (n + 1) for n, name in enumerate(names)}
    weight_format, packed = Nvfp4("max"), {}
    for name in names:  # each by itself: another global scale than the fused layer's
        parts = weight_format.quantize(dense[f"{name}.weight"])
        packed |= {f"{name}.{key}": tensor for key, tensor in parts.items()}
    for folder, tensors in (("dense", dense), ("packed", packed)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / "model.safetensors")
    files = [WeightFiles(tmp_path / folder) for folder in ("dense", "packed")]
    first, second = weight_error.layers(weight_format, *files, names, torch.device("cpu"))
    assert not torch.equal(first.stored, first.nearest), "the smaller one of the two had the larger scale"
    assert torch.equal(second.stored, second.nearest)
    assert torch.equal(second.weight, dense["m.k_proj.weight"])
