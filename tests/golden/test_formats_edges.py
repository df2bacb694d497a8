"""Formats quantize outliers and denormals, and refuse NaN, odd sizes and unknown names."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from packed_layers import BF16, BY_NAME, FP8, MXFP4, NF4, NVFP4
from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.formats.format import Format
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.formats.nvfp4 import Nvfp4

PACKED = [
    NVFP4, Nvfp4("four_over_six"),
    MXFP4, Mxfp4("floor"), Mxfp4("ceil"),
    Nf4(False), Nf4(True), FP8,
]  # fmt: skip
ALL = [*PACKED, BF16]


def roundtrip(weight: Tensor, weight_format: Format) -> Tensor:
    packed = weight_format.quantize(weight)
    return weight_format.dequantize(packed, tuple(weight.shape), torch.float32)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("weight_format", PACKED, ids=repr)
def test_huge_outlier_survives_and_nothing_overflows(weight_format: Format) -> None:
    weight = normal(8, 128)
    weight[3, 5] = 1e30
    values = roundtrip(weight, weight_format)
    assert values.isfinite().all()
    assert values[3, 5].item() == pytest.approx(1e30, rel=0.25)  # MXFP4: 1e30 is 6.3 of its block's units


def test_nvfp4_block_scales_can_be_subnormal() -> None:
    """Blocks 2**-15 to 2**-17.8 below the largest have E4M3 scales under 2**-6, with fewer bits, down to none."""
    weight = normal(4, 16).clamp(-1, 1)
    weight[:, 0] = torch.tensor([1.0, 2**-15, 2**-17.5, 2**-19])
    weight[1:, 1:] *= weight[1:, :1]
    packed = NVFP4.quantize(weight)
    assert packed["weight_scale"].flatten().tolist() == [
        448.0,
        7 * 2**-9,
        2**-9,
        0.125,
    ]  # the last: no codes, any scale
    values = NVFP4.dequantize(packed, (4, 16), torch.float32)
    assert values[1, 0].item() == pytest.approx(2**-15, rel=1e-5)
    assert values[3].count_nonzero() == 0


@pytest.mark.parametrize("weight_format", PACKED, ids=repr)
def test_denormals_become_zeros(weight_format: Format) -> None:
    assert roundtrip(normal(4, 64) * 1e-40, weight_format).count_nonzero() == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**100])
@pytest.mark.parametrize("weight_format", ALL, ids=repr)
def test_error_names_the_tensor_that_is_not_finite(weight_format: Format, value: float) -> None:
    weight = normal(4, 64)
    weight[2, 7] = value
    with pytest.raises(
        ValueError, match=rf"^layers\.0\.up: 1 values that {weight_format.NAME} cannot hold, .* at \[2, 7\]"
    ):
        weight_format.quantize(weight, name="layers.0.up")


@pytest.mark.parametrize("weight_format", PACKED, ids=repr)
def test_largest_magnitudes_do_not_overflow(weight_format: Format) -> None:
    weight = normal(8, 128).sign() * torch.nextafter(torch.tensor(2.0**100), torch.tensor(0.0))
    assert roundtrip(weight, weight_format).isfinite().all()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("nvfp4", (4, 100), r"^up: K=100 is not divisible by 16, .*multiples of 16.*ignore"),
        ("mxfp4", (4, 48), r"^up: K=48 is not divisible by 32, .*multiples of 32.*ignore"),
        ("nf4", (3, 100), r"^up: N\*K=300 is not divisible by 64, .*multiples of 64.*ignore"),
        ("fp8", (64,), r"^up: fp8 packs a matrix \[N, K\] .* got shape \[64\]"),
        ("nvfp4", (64,), r"^up: nvfp4 packs a matrix \[N, K\] .* got shape \[64\]"),
        ("bf16", (2, 3, 4), r"^up: bf16 packs a matrix"),
    ],
)
def test_error_on_a_size_that_does_not_fit(name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BY_NAME[name].quantize(torch.ones(shape), name="up")


def test_fp8_takes_rows_of_any_length() -> None:
    assert roundtrip(normal(3, 7), FP8).shape == (3, 7)


def test_an_unknown_format_is_refused_with_the_names_of_all() -> None:
    for unknown in ("nvfp5", "linear", "../nvfp4"):
        with pytest.raises(ValueError, match=r"unknown weight format .*; allowed: bf16, fp8, mxfp4, nf4, nvfp4"):
            formats.build(FormatConfig(name=unknown))


@pytest.mark.parametrize("kind", [Nvfp4, Mxfp4])
def test_a_format_with_an_unknown_rule_dequantizes_but_does_not_quantize(kind: type[Format]) -> None:
    unknown = kind(None)
    with pytest.raises(ValueError, match="_rule None; allowed: "):
        unknown.quantize(normal(4, 64))
    packed = BY_NAME[kind.NAME].quantize(normal(4, 64))
    assert unknown.accept(packed, (4, 64), name="up").keys() == packed.keys()
    assert unknown.dequantize(packed, (4, 64), torch.float32).count_nonzero()


@pytest.mark.parametrize(
    ("weight_format", "bits"), [*zip(ALL, [4.5, 4.5, 4.25, 4.25, 4.25, 4.5, 4.127, 8, 16], strict=True)], ids=repr
)
def test_bits_per_weight_counts_the_stored_bytes(weight_format: Format, bits: float) -> None:
    assert weight_format.bits_per_weight == pytest.approx(bits, abs=5e-4)
    packed = weight_format.quantize(normal(512, 1024))
    nf4 = 16 * 4 + 256 + (256 * 4 if weight_format == NF4 else 0)
    constants = {"nvfp4": 4, "nf4": nf4, "fp8": 512 * 2}.get(weight_format.NAME, 0)
    stored = sum(tensor.nbytes for tensor in packed.values())
    assert stored == 512 * 1024 * weight_format.bits_per_weight / 8 + constants


def test_importing_the_formats_imports_no_optional_library() -> None:
    code = (
        "import sys, qerl_lab.formats; "
        "print([m for m in ('peft', 'bitsandbytes', 'compressed_tensors', 'transformers') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
