"""NVFP4 and MXFP4 have the bits that compressed-tensors 0.17 writes; FP8 has its bits for float32 weights."""

from collections.abc import Iterator

import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor

from packed_layers import BY_NAME, FP8, NVFP4

COMPRESSORS = {"nvfp4": (NVFP4PackedCompressor, "NVFP4A16"), "mxfp4": (MXFP4PackedCompressor, "MXFP4A16")}
SHAPE = (48, 128)


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """Turn off torch.compile, because their compiled cast_to_fp4 would need a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        yield


def theirs(weight: Tensor, name: str, global_scale: Tensor | None = None) -> dict[str, Tensor]:
    compressor, preset = COMPRESSORS[name]
    scheme = preset_name_to_scheme(preset, ["Linear"])
    state = {"weight": weight}
    if name == "nvfp4":
        own = generate_gparam(weight.min(), weight.max())
        state["weight_global_scale"] = own if global_scale is None else global_scale
    blocks = weight.unflatten(1, (-1, BY_NAME[name].BLOCK))
    state["weight_scale"], _ = calculate_qparams(
        blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=state.get("weight_global_scale")
    )
    return compressor.compress(state, scheme)


def their_weight(packed: dict[str, Tensor], name: str) -> Tensor:
    compressor, preset = COMPRESSORS[name]
    return compressor.decompress(packed, preset_name_to_scheme(preset, ["Linear"]))["weight"]


def samples() -> dict[str, Tensor]:
    """Return float32 weights: smooth, heavy-tailed, of mixed magnitudes, on the grid, and edge cases."""
    torch.manual_seed(0)
    normal = torch.randn(SHAPE)
    ties = torch.tensor([6, -6, 0.25, -0.25, 0.75, 1.25, -1.25, 1.75, 2.5, -2.5, 3.5, 5.0, -5.0, 0.5, 0.0, -0.0])
    outlier = normal.clone()
    outlier[3, 5] = 1e30
    underflow = 1e4 * normal  # the quotient by MXFP4's scale is 0 in bfloat16 only: code 0 there, 8 in float32
    underflow[:, ::16] = -2e-38
    zero_blocks = normal.clone()
    zero_blocks[::2, :64] = 0
    return {
        "normal": 0.02 * normal,
        "uniform": torch.rand(SHAPE) - 0.5,
        "cauchy": normal / torch.randn(SHAPE),
        "rows_of_many_sizes": normal * torch.logspace(-12, 6, SHAPE[0]).unsqueeze(1),
        "blocks_of_many_sizes": normal * torch.logspace(-9, 3, SHAPE[1]),
        "ties": ties.repeat(SHAPE[0], SHAPE[1] // 16) * torch.logspace(-20, 20, SHAPE[0], base=2).unsqueeze(1),
        "zero": torch.zeros(SHAPE),
        "negative_zero": -torch.zeros(SHAPE),
        "zero_blocks": zero_blocks,
        "outlier": outlier,
        "denormal": normal * 1e-40,
        "underflow": underflow,
        "tiny": normal * 1e-36,
        "large": normal.clamp(-1, 1) * 1.2e30,
        "negative": -normal.abs(),
        "one_sign_of_each_block": normal.abs() * torch.tensor([1.0, -1.0]).repeat_interleave(32).repeat(2),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sample", samples())
@pytest.mark.parametrize("name", COMPRESSORS)
def test_bits_equal_those_of_compressed_tensors(name: str, sample: str, dtype: torch.dtype) -> None:
    weight = samples()[sample].to(dtype)
    ours, reference = BY_NAME[name].quantize(weight), theirs(weight, name)
    assert set(ours) == set(reference)
    for key, tensor in reference.items():
        assert ours[key].dtype is tensor.dtype
        assert torch.equal(ours[key].view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("name", COMPRESSORS)
def test_dequantized_weight_equals_compressed_tensors_in_bfloat16(name: str) -> None:
    weight = samples()["cauchy"]
    packed = BY_NAME[name].quantize(weight)
    assert torch.equal(BY_NAME[name].dequantize(packed, SHAPE, torch.bfloat16), their_weight(packed, name))


def test_fused_weights_share_one_global_scale() -> None:
    weights = [samples()["normal"], 3 * samples()["normal"]]
    shared = NVFP4.global_scale(weights)
    assert torch.equal(shared, generate_gparam(weights[1].min(), weights[1].max()))
    ours, reference = NVFP4.fused_quantize(weights)(weights[0]), theirs(weights[0], "nvfp4", shared)
    assert all(torch.equal(ours[key].view(torch.uint8), reference[key].view(torch.uint8)) for key in reference)


def test_global_scale_that_is_too_large_saturates() -> None:
    weight, scale = samples()["normal"], torch.tensor([1e6])
    ours, reference = NVFP4.quantize(weight, global_scale=scale), theirs(weight, "nvfp4", scale)
    assert ours["weight_scale"].float().max() == 448
    assert all(torch.equal(ours[key].view(torch.uint8), reference[key].view(torch.uint8)) for key in reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sample", samples())
def test_fp8_equals_compressed_tensors_with_a_bfloat16_scale(sample: str, dtype: torch.dtype) -> None:
    weight, scheme = samples()[sample].to(dtype), preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    ours = FP8.quantize(weight)
    scale, _ = calculate_qparams(weight.amin(1, keepdim=True), weight.amax(1, keepdim=True), scheme.weights)
    is_zero = (scale.bfloat16() == 0) | (weight == 0).all(1, keepdim=True)  # their scale of zeros depends on the dtype
    assert torch.equal(torch.where(is_zero, 2.0**-7, scale).bfloat16(), ours["weight_scale"])
    state = {"weight": weight.float(), "weight_scale": ours["weight_scale"].float()}
    reference = FloatQuantizationCompressor.compress(state, scheme)["weight"]
    assert torch.equal(ours["weight"].view(torch.uint8), reference.view(torch.uint8))
    assert torch.equal(
        FP8.dequantize(ours, SHAPE, torch.bfloat16), FloatQuantizationCompressor.decompress(ours, scheme)["weight"]
    )


def test_fp8_rounds_a_bfloat16_weight_once_and_compressed_tensors_twice() -> None:
    weight, scheme = samples()["normal"].bfloat16(), preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
    ours = FP8.quantize(weight)
    theirs = FloatQuantizationCompressor.compress({**ours, "weight": weight}, scheme)["weight"]
    steps = ours["weight"].view(torch.uint8).int() - theirs.view(torch.uint8).int()
    assert steps.abs().max() == 1
    assert 0.02 < steps.count_nonzero() / steps.numel() < 0.04
    exact = weight.float() / ours["weight_scale"].float()
    assert ((ours["weight"].float() - exact).abs() <= (theirs.float() - exact).abs()).all()
