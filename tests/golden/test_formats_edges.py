"""What the formats do with zeros, outliers, denormals, NaN, odd sizes and unknown names."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_lab.formats import codec, names

PACKED = [
    ("nvfp4", {}), ("nvfp4", {"scale_rule": "four_over_six"}),
    ("mxfp4", {}), ("mxfp4", {"exponent_rule": "floor"}), ("mxfp4", {"exponent_rule": "ceil"}),
    ("nf4", {"double_quant": False}), ("nf4", {"double_quant": True}),
]  # fmt: skip
ALL = [*PACKED, ("bf16", {})]


def roundtrip(weight: Tensor, name: str, options: dict[str, Any]) -> Tensor:
    packed = codec(name).quantize(weight, **options)
    return codec(name).dequantize(packed, tuple(weight.shape), torch.float32)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("name", "options"), ALL)
def test_zeros_stay_zeros(name: str, options: dict[str, Any]) -> None:
    weight = normal(8, 128)
    weight[2:, :64] = 0
    assert roundtrip(weight, name, options)[2:, :64].count_nonzero() == 0
    assert roundtrip(torch.zeros(8, 128), name, options).count_nonzero() == 0


@pytest.mark.parametrize(("name", "options"), PACKED)
def test_huge_outlier_survives_and_nothing_overflows(name: str, options: dict[str, Any]) -> None:
    weight = normal(8, 128)
    weight[3, 5] = 1e30
    values = roundtrip(weight, name, options)
    assert values.isfinite().all()
    assert values[3, 5].item() == pytest.approx(1e30, rel=0.25)  # MXFP4: 1e30 is 6.3 of its block's units


def test_outlier_costs_only_its_block_where_blocks_stand_alone() -> None:
    weight = normal(8, 128)
    clean = {
        name: roundtrip(weight, name, options) for name, options in [("mxfp4", {}), ("nf4", {"double_quant": False})]
    }
    weight[3, 5] = 1e30
    for name, options in [("mxfp4", {}), ("nf4", {"double_quant": False})]:
        assert torch.equal(roundtrip(weight, name, options)[4:], clean[name][4:])
    assert roundtrip(weight, "nvfp4", {})[4:].count_nonzero() == 0  # below 2**-10 of the largest block: gone
    assert roundtrip(weight, "nf4", {"double_quant": True})[4:].abs().max() > 1e20  # their mean is the outlier's


def test_nvfp4_subnormal_block_scales() -> None:
    """Blocks 2**-15 to 2**-17.8 below the largest have E4M3 scales under 2**-6, with fewer bits, down to none."""
    weight = normal(4, 16).clamp(-1, 1)
    weight[:, 0] = torch.tensor([1.0, 2**-15, 2**-17.5, 2**-19])
    weight[1:, 1:] *= weight[1:, :1]
    packed = codec("nvfp4").quantize(weight)
    assert packed["weight_scale"].flatten().tolist() == [
        448.0,
        7 * 2**-9,
        2**-9,
        0.125,
    ]  # the last: no codes, any scale
    values = codec("nvfp4").dequantize(packed, (4, 16), torch.float32)
    assert values[1, 0].item() == pytest.approx(2**-15, rel=1e-5)
    assert values[3].count_nonzero() == 0


@pytest.mark.parametrize(("name", "options"), PACKED)
def test_denormals_become_zeros(name: str, options: dict[str, Any]) -> None:
    assert roundtrip(normal(4, 64) * 1e-40, name, options).count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**100])
@pytest.mark.parametrize(("name", "options"), ALL)
def test_error_names_the_tensor_that_is_not_finite(name: str, options: dict[str, Any], value: float) -> None:
    weight = normal(4, 64)
    weight[2, 7] = value
    with pytest.raises(ValueError, match=rf"^layers\.0\.up: 1 values that {name} cannot hold, .* at \[2, 7\]"):
        codec(name).quantize(weight, name="layers.0.up", **options)


@pytest.mark.parametrize(("name", "options"), PACKED)
def test_largest_magnitudes_do_not_overflow(name: str, options: dict[str, Any]) -> None:
    weight = normal(8, 128).sign() * torch.nextafter(torch.tensor(2.0**100), torch.tensor(0.0))
    assert roundtrip(weight, name, options).isfinite().all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("nvfp4", (4, 100), r"^up: K=100 is not divisible by 16, .*multiples of 16.*ignore"),
        ("mxfp4", (4, 48), r"^up: K=48 is not divisible by 32, .*multiples of 32.*ignore"),
        ("nf4", (3, 100), r"^up: N\*K=300 is not divisible by 64, .*multiples of 64.*ignore"),
        ("nvfp4", (64,), r"^up: nvfp4 packs a matrix \[N, K\] .* got shape \[64\]"),
        ("bf16", (2, 3, 4), r"^up: bf16 packs a matrix"),
    ],
)
def test_error_on_a_size_that_does_not_fit(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        codec(name).quantize(torch.ones(shape), name="up")


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "nf4", "bf16"])
def test_error_on_a_dtype_that_is_no_weight(name: str) -> None:
    with pytest.raises(ValueError, match=r"got shape \[4, 64\] in torch.uint8"):
        codec(name).quantize(torch.ones(4, 64, dtype=torch.uint8))


@pytest.mark.parametrize(("name", "options"), ALL)
def test_float16_is_widened_and_the_input_left_alone(name: str, options: dict[str, Any]) -> None:
    weight = (0.01 * normal(8, 128)).half().t().contiguous().t()  # strided
    before = weight.clone()
    assert torch.equal(roundtrip(weight, name, options), roundtrip(weight.float(), name, options))
    assert torch.equal(weight, before)


@pytest.mark.parametrize("scale", [torch.zeros(1), torch.tensor([float("inf")]), torch.ones(2), -torch.ones(1)])
def test_error_on_a_bad_global_scale(scale: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^up: global_scale must be one positive finite number"):
        codec("nvfp4").quantize(normal(4, 64), name="up", global_scale=scale)


def test_names_and_unknown_name() -> None:
    assert {"bf16", "mxfp4", "nf4", "nvfp4"} <= set(names())
    assert [codec(name).NAME for name in names()] == list(names())
    for unknown in ("nvfp5", "linear", "../nvfp4"):
        with pytest.raises(ValueError, match=r"unknown weight format .*; allowed: bf16, .*nvfp4"):
            codec(unknown)


@pytest.mark.parametrize(
    ("name", "options", "bits"),
    [(*case, bits) for case, bits in zip(ALL, [4.5, 4.5, 4.25, 4.25, 4.25, 4.5, 4.127, 16], strict=True)],
)
def test_bits_per_weight_is_what_is_stored(name: str, options: dict[str, Any], bits: float) -> None:
    assert codec(name).bits_per_weight(**options) == pytest.approx(bits, abs=5e-4)
    packed = codec(name).quantize(normal(512, 1024), **options)
    constants = {"nvfp4": 4, "nf4": 16 * 4 + 256 + (256 * 4 if options.get("double_quant") else 0)}.get(name, 0)
    stored = sum(tensor.nbytes for tensor in packed.values())
    assert stored == 512 * 1024 * codec(name).bits_per_weight(**options) / 8 + constants


def test_importing_the_formats_imports_no_optional_library() -> None:
    code = (
        "import sys, qerl_lab.formats as f; [f.codec(n) for n in f.names()]; "
        "print([m for m in ('peft', 'bitsandbytes', 'compressed_tensors', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
