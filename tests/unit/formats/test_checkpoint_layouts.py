"""What each format says its tensors are, and what it accepts as such from a checkpoint."""

import pytest
import torch

from packed_layers import FP8, MXFP4, NF4, NVFP4
from qerl_lab.formats import format as machinery
from qerl_lab.formats.format import Format

SHAPE = (48, 96)


def packed(weight_format: Format) -> dict[str, torch.Tensor]:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return weight_format.quantize(weight)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_that_is_none_is_refused(value: float) -> None:
    tensors = packed(NVFP4) | {"weight_global_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match=r"q_proj\.weight_global_scale is .*; allowed: positive finite numbers"):
        NVFP4.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xB8, 0xFF])
def test_a_block_scale_with_a_sign_or_none_at_all_is_refused(byte: int) -> None:
    tensors = packed(NVFP4)
    tensors["weight_scale"].view(torch.uint8)[1, 0] = byte
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale has negative numbers or NaN; allowed: 0 to 448"):
        NVFP4.accept(tensors, SHAPE, name="q_proj")
    tensors["weight_scale"].view(torch.uint8)[1, 0] = 0x7E
    assert NVFP4.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_row_scale_that_is_none_is_refused(value: float) -> None:
    tensors = packed(FP8)
    tensors["weight_scale"][5] = value
    with pytest.raises(ValueError, match=r"q_proj\.weight_scale has other than positive finite numbers"):
        FP8.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_value_of_fp8_that_is_none_is_refused(byte: int) -> None:
    tensors = packed(FP8)
    tensors["weight"].view(torch.uint8)[1, 0] = byte
    with pytest.raises(ValueError, match=r"q_proj\.weight has NaN; allowed: -448 to 448"):
        FP8.accept(tensors, SHAPE, name="q_proj")


def test_the_header_of_another_program_is_padded() -> None:
    """bitsandbytes stores it without the spaces."""
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors = packed(NF4)
    short = torch.tensor(list(bytes(tensors[key].tolist()).rstrip()), dtype=torch.uint8)
    assert short.numel() < 256
    assert torch.equal(NF4.accept(tensors | {key: short}, SHAPE, name="q_proj")[key], tensors[key])


def test_rows_quantized_apart_are_named_in_errors() -> None:
    weight = torch.ones(SHAPE)
    weight[9, 3] = torch.nan
    with pytest.raises(ValueError, match=r"^w, row 7 and following: 1 values .* at \[2, 3\]"):
        machinery.quantized_by_rows(MXFP4.quantize, weight, 7, name="w")
