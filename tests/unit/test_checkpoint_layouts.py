"""What each codec says its tensors are, and what it accepts as such from a checkpoint."""

import json
import re
from typing import Any

import pytest
import torch

from qerl_lab.formats import codec, codecs

CASES = [("nvfp4", {}), ("mxfp4", {}), ("bf16", {}), ("nf4", {"double_quant": True}), ("nf4", {"double_quant": False})]
SHAPE = (48, 96)


def packed(name: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    return codec(name).quantize(weight, **options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_layout_is_what_quantize_makes(name: str, options: dict[str, Any]) -> None:
    tensors = packed(name, options)
    found = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
    assert codec(name).layout(SHAPE, **options) == found
    accepted = codec(name).accept(tensors, SHAPE, name="q_proj", **options)
    assert list(accepted) == list(found)
    assert all(torch.equal(accepted[key].view(torch.uint8), tensors[key].view(torch.uint8)) for key in found)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_another_shape_or_dtype_is_refused_for_each_tensor(name: str, options: dict[str, Any]) -> None:
    tensors = packed(name, options)
    for key, tensor in tensors.items():
        for other in (tensor.float().to(torch.float64), torch.cat([tensor] * 40)):
            with pytest.raises(ValueError, match=re.escape(f"q_proj.{key} is {other.dtype} {list(other.shape)}")):
                codec(name).accept(tensors | {key: other}, SHAPE, name="q_proj", **options)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_global_scale_that_is_none_is_refused(value: float) -> None:
    tensors = packed("nvfp4", {}) | {"weight_global_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match=r"q_proj\.weight_global_scale is .*; allowed: positive finite numbers"):
        codec("nvfp4").accept(tensors, SHAPE, name="q_proj")


def test_the_header_of_another_program_is_padded() -> None:
    """bitsandbytes stores it without the spaces."""
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors = packed("nf4", {})
    short = torch.tensor(list(bytes(tensors[key].tolist()).rstrip()), dtype=torch.uint8)
    assert short.numel() < 256
    assert torch.equal(codec("nf4").accept(tensors | {key: short}, SHAPE, name="q_proj")[key], tensors[key])


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [96, 48]},
        {"quant_type": "fp4"},
        {"blocksize": 128},
        {"nested_blocksize": 64},
        {"nested_blocksize": None},
    ],
)
def test_a_header_that_disagrees_is_refused(change: dict[str, Any]) -> None:
    key = "weight.quant_state.bitsandbytes__nf4"
    tensors = packed("nf4", {})
    header = json.dumps(json.loads(bytes(tensors[key].tolist())) | change).encode()
    tensors[key] = torch.tensor(list(header), dtype=torch.uint8)
    ((field, value),) = change.items()
    with pytest.raises(ValueError, match=re.escape(f"q_proj.{key} says {field}={value}; allowed: ")):
        codec("nf4").accept(tensors, SHAPE, name="q_proj")


def test_a_header_that_is_no_json_is_refused() -> None:
    tensors = packed("nf4", {}) | {"weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"q_proj\.weight\.quant_state\.bitsandbytes__nf4 is not JSON"):
        codec("nf4").accept(tensors, SHAPE, name="q_proj")


@pytest.mark.parametrize(("name", "options"), CASES)
def test_rows_quantized_apart_are_the_whole(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    options = codec(name).shared_options([weight]) | options
    whole = codec(name).quantize(weight, **options)
    monkeypatch.setattr(codecs, "_SLICE_ELEMENTS", 7 * SHAPE[1])
    parts = codecs.quantize_by_rows(codec(name), weight, name="w", **options)
    assert list(parts) == list(whole)
    assert all(torch.equal(parts[key].view(torch.uint8), whole[key].view(torch.uint8)) for key in whole)


def test_rows_quantized_apart_are_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(SHAPE)
    weight[9, 3] = torch.nan
    monkeypatch.setattr(codecs, "_SLICE_ELEMENTS", 7 * SHAPE[1])
    with pytest.raises(ValueError, match=r"^w, row 7 and following: 1 values .* at \[2, 3\]"):
        codecs.quantize_by_rows(codec("mxfp4"), weight, name="w")
