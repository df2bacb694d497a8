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
@pytest.mark.parametrize(("weight_format", "key", "at"), [(NVFP4, "weight_global_scale", 0), (FP8, "weight_scale", 5)])
def test_a_scale_that_is_none_is_refused(weight_format: Format, key: str, at: int, value: float) -> None:
    tensors = packed(weight_format)
    tensors[key][at] = value
    with pytest.raises(ValueError, match=rf"q_proj\.{key} (is .*; allowed:|has other than) positive finite numbers"):
        weight_format.accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize(("weight_format", "key", "byte", "says"), [
    *[(NVFP4, "weight_scale", byte, "negative numbers or NaN; allowed: 0 to 448") for byte in (0x7F, 0x80, 0xB8, 0xFF)],
    *[(FP8, "weight", byte, "NaN; allowed: -448 to 448") for byte in (0x7F, 0xFF)],
])  # fmt: skip
def test_a_byte_that_is_no_number_there_is_refused(weight_format: Format, key: str, byte: int, says: str) -> None:
    tensors = packed(weight_format)
    tensors[key].view(torch.uint8)[1, 0] = byte
    with pytest.raises(ValueError, match=rf"q_proj\.{key} has {says}"):
        weight_format.accept(tensors, SHAPE, name="q_proj")
    tensors[key].view(torch.uint8)[1, 0] = 0x7E
    assert weight_format.accept(tensors, SHAPE, name="q_proj")


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
