"""NVFP4 weights that vLLM packed for Marlin are unpacked again, by torch code and by a Triton kernel."""

import os

import pytest
import torch
from torch import Tensor

import marlin_packer
from packed_layers import BITS, E4M3, NVFP4, check_same
from qerl_lab.formats import marlin
from qerl_lab.formats.marlin import CODES, SCALE, Marlin
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SHAPES = [(64, 128), (128, 64), (192, 576), (320, 1152), (64, 2048)]  # N, K: multiples of (64, 128) or (128, 64)


def anything(rows: int, columns: int, scales: Tensor) -> dict[str, Tensor]:
    """Draw any codes, and block scales from the bytes `scales`. Every weight has the first of these."""
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    drawn = scales[torch.randint(0, len(scales), (rows, columns // 16), generator=generator)]
    drawn[-1, -1] = scales[0]
    return {"weight_packed": codes, "weight_scale": drawn.view(torch.float8_e4m3fn), GLOBAL_SCALE: torch.tensor([3.0])}


def held_by_marlin(*parts: dict[str, Tensor]) -> tuple[dict[str, Tensor], Marlin]:
    layer = marlin_packer.layer(parts)
    global_scale = parts[0][GLOBAL_SCALE]
    boost = (2.0**119 / global_scale / layer.weight_global_scale).item()
    return {CODES: layer.weight.data, SCALE: layer.weight_scale.data, GLOBAL_SCALE: global_scale}, Marlin(boost)


@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_returns_every_bit(shape: tuple[int, int]) -> None:
    """The weight has every code, and every scale that Marlin keeps: zero, and 2^-6 to 448."""
    kept = torch.cat([torch.tensor([0x7E], dtype=torch.uint8), E4M3[:1], E4M3[8:]])
    packed = anything(*shape, kept)
    held, form = held_by_marlin(packed)
    assert form.boost == 1
    check_same(form.stored(held), packed)


def test_every_scale_comes_back_except_subnormal_ones() -> None:
    packed = anything(64, 32 * len(E4M3), E4M3)
    packed["weight_scale"] = E4M3.repeat(64, 2).view(torch.float8_e4m3fn)
    held, form = held_by_marlin(packed)
    lost = (packed["weight_scale"].float() > 0) & (packed["weight_scale"].float() < 2.0**-6)
    assert int(lost.sum()) == 64 * 2 * 7  # the subnormal numbers, 1 to 7 times 2^-9
    found = form.stored(held)["weight_scale"].float()
    assert torch.equal(found, torch.where(lost, 0.0, packed["weight_scale"].float()))


@pytest.mark.parametrize(("top", "boost"), [(0x7E, 1), (0x77, 1), (0x76, 2), (0x66, 8), (0x5E, 16), (0x38, 256)])
def test_a_tensor_of_small_scales_is_boosted_by_a_power_of_two(top: int, boost: int) -> None:
    """Subnormal scales are kept too, from a boost of 8 on."""
    packed = anything(128, 256, torch.tensor([top, 0x01, 0x07, 0x08, 0x30][: 5 if boost >= 8 else 1]).to(torch.uint8))
    held, form = held_by_marlin(packed)
    assert form.boost == boost
    check_same(form.stored(held), packed)


def test_parts_of_a_fused_layer_are_views_of_it() -> None:
    kept = E4M3[8:].flip(0)
    parts = [anything(rows, 256, kept) for rows in (192, 64, 64)]
    held, form = held_by_marlin(*parts)
    first = 0
    for packed in parts:
        rows = len(packed["weight_packed"])
        own = marlin.part(held, first, rows)
        assert all(own[key].untyped_storage().data_ptr() == held[key].untyped_storage().data_ptr() for key in own)
        check_same(form.stored(own), packed)
        first += rows


@pytest.mark.parametrize(
    ("shape", "dtype"), [*((shape, torch.bfloat16) for shape in SHAPES), (SHAPES[2], torch.float32)]
)
def test_the_kernel_has_the_bits_of_the_torch_code(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Check both parts of a fused weight."""
    pytest.importorskip("triton")
    from qerl_lab.formats.unpack_kernels import dequantize_marlin

    rows, columns = shape
    top = 0x66  # the largest scale of tensors with a boost of 8
    for scales in (E4M3[8:].flip(0), E4M3[: top + 1].flip(0)):
        one, two = anything(rows, columns, scales), anything(64, columns, scales)
        held, form = held_by_marlin(one, two)
        for first, packed in ((0, one), (rows, two)):
            size = len(packed["weight_packed"])
            own = {key: tensor.to(DEVICE) for key, tensor in held.items()}
            own = marlin.part(own, first, size)
            got = dequantize_marlin(own[CODES], own[SCALE], form.boost, dtype).cpu()
            expected = NVFP4.decoder(packed, (size, columns)).unpack(dtype)
            assert (got.shape, got.dtype) == (expected.shape, dtype)
            assert torch.equal(got.view(BITS[dtype]), expected.view(BITS[dtype]))


if not INTERPRETED:
    test_the_kernel_has_the_bits_of_the_torch_code = pytest.mark.gpu(test_the_kernel_has_the_bits_of_the_torch_code)
