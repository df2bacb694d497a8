"""Laws that every weight format must obey. Check them on a new `Format` before a model is packed in it.

Each law is a function that takes a format and raises AssertionError, saying what the format does instead, if the format
breaks the law. `broken_laws` runs all of them on a small test weight.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats.format import Format, pack_fused, quantized_by_rows

CONSTANT_BYTES = 2048  # per tensor, not counted in `bits_per_weight`
_ROWS, _COLUMNS = 128, 1024  # large enough that 2 KiB are at most an eighth of a bit per weight
SHAPE = (_ROWS, _COLUMNS)


def broken_laws(weight_format: Format) -> dict[str, str]:
    """Check that a format obeys every law in `LAWS`, the properties that each format must have.

    Return a dict from the name of each broken law to its error message; {} if none is broken.
    """
    broken = {}
    for law in LAWS:
        try:
            law(weight_format)
        except Exception as error:  # report any error of a new format and go on
            broken[law.__name__] = str(error) if type(error) is AssertionError else f"{type(error).__name__}: {error}"
    return broken


def packs_what_its_layout_says(weight_format: Format) -> None:
    """Raise AssertionError unless `quantize` returns tensors with the names, shapes and dtypes that `layout` gives.

    `accept` must return these tensors, and refuse them if one of them has twice its size.
    """
    packed, layout = weight_format.quantize(_test_weight()), weight_format.layout(SHAPE)
    found = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in packed.items()}
    assert found == layout, f"quantize makes {found}, layout says {layout}"
    assert list(weight_format.accept(packed, SHAPE, name="q_proj")) == list(layout), "accept drops or adds tensors"
    for key, tensor in packed.items():
        wrong = packed | {key: torch.cat([tensor, tensor])}
        _require_refusal(partial(weight_format.accept, wrong, SHAPE, name="q_proj"), f"{key} of twice the size")


def gives_weights_back(weight_format: Format) -> None:
    """Raise AssertionError unless `dequantize` returns the weight `[N, K]` with an error below half of its norm.

    In bfloat16 it must return its float32 result rounded once, and zeros must stay zeros.
    """
    weight = _test_weight()
    packed = weight_format.quantize(weight)
    exact = weight_format.dequantize(packed, SHAPE, torch.float32)
    assert (exact.shape, exact.dtype) == (SHAPE, torch.float32), f"float32 {list(exact.shape)} expected"
    error = ((exact - weight).norm() / weight.norm()).item()
    assert error < 0.5, f"the unpacked weight differs from the dense one by {error:.2f} of its norm"
    short = weight_format.dequantize(packed, SHAPE, torch.bfloat16)
    assert torch.equal(short, exact.bfloat16()), "bfloat16 is not float32 rounded once"
    zeros = weight_format.dequantize(weight_format.quantize(torch.zeros(SHAPE)), SHAPE, torch.float32)
    assert not zeros.any(), f"zeros become {zeros.unique()[:4].tolist()}"


def decodes_what_it_stores(weight_format: Format) -> None:
    """Raise AssertionError unless the format's `decoder` and `dequantize` unpack the same weight.

    alpha * unpack(float32) must equal `dequantize` in float32 up to a relative 1e-6, and unpack(bfloat16) must be
    unpack(float32) rounded; `Decoder` explains alpha and unpack.
    """
    packed = weight_format.quantize(_test_weight())
    unpack, alpha = weight_format.decoder(packed, SHAPE)
    exact = weight_format.dequantize(packed, SHAPE, torch.float32)
    is_close = torch.allclose(unpack(torch.float32) * alpha, exact, rtol=1e-6, atol=0)
    assert is_close, "alpha * decoder.unpack is not dequantize"
    assert torch.equal(unpack(torch.bfloat16), unpack(torch.float32).bfloat16()), "W' in bfloat16 is another weight"


def stores_its_bits(weight_format: Format) -> None:
    """Raise AssertionError unless packed tensors take `bits_per_weight` bits per weight and at most 2 KiB more."""
    stored = sum(tensor.nbytes for tensor in weight_format.quantize(_test_weight()).values())
    beyond = stored - _ROWS * _COLUMNS * weight_format.bits_per_weight / 8
    assert -1 < beyond <= CONSTANT_BYTES, f"{stored} bytes are stored, {beyond:+.0f} beyond bits_per_weight"


def packs_rows_apart(weight_format: Format) -> None:
    """Raise AssertionError unless packing five rows at a time gives the same bytes as packing the whole weight.

    The rows are packed without and with autocast. Formats without BY_ROWS are not checked.
    """
    if not weight_format.BY_ROWS:
        return
    weight = _test_weight()
    quantize = weight_format.fused_quantize([weight])
    whole, apart = quantize(weight), quantized_by_rows(quantize, weight, 5, name="weight")
    assert _same_bytes(whole, apart), "rows packed five at a time are other bytes than the whole"
    with torch.autocast("cpu", torch.bfloat16):
        apart = quantized_by_rows(quantize, weight, 5, name="weight")
    assert _same_bytes(whole, apart), "rows packed under autocast are other bytes than the whole"


def packs_a_value_alike(weight_format: Format) -> None:
    """Raise AssertionError unless equal weights are packed in equal bytes, and `quantize` leaves its input unchanged.

    The same values are packed in float32, in float64, from a tensor that is not contiguous, and by `pack_fused`.
    """
    weight = _test_weight().bfloat16().float()
    before, usual = weight.clone(), weight_format.quantize(weight)
    assert torch.equal(weight, before), "quantize changes the weight that it is given"
    assert _same_bytes(weight_format.quantize(weight.double()), usual), "float64 is packed otherwise than float32"
    sliced = torch.stack([weight, weight], -1)[..., 0]
    assert _same_bytes(weight_format.quantize(sliced), usual), "a weight that is not contiguous is packed otherwise"
    ((_, alone),) = pack_fused(weight_format, {"q_proj": weight})
    assert _same_bytes(alone, usual), "a layer packed by pack_fused is other bytes than by quantize"


def refuses_unpackable_weights(weight_format: Format) -> None:
    """Raise AssertionError unless `quantize` raises ValueError for weights with NaN or Inf, vectors and integers.

    The error must name the layer. A format with blocks within rows (BY_ROWS) must also refuse a K that is no multiple
    of BLOCK.
    """
    weight = _test_weight()
    for value in (float("nan"), float("inf")):
        bad = weight.clone()
        bad[3, 5] = value
        _require_refusal(partial(weight_format.quantize, bad, name="q_proj"), f"a weight with {value}")
    _require_refusal(partial(weight_format.quantize, weight[0], name="q_proj"), "a vector")
    _require_refusal(partial(weight_format.quantize, weight.int(), name="q_proj"), "whole numbers")
    if weight_format.BY_ROWS and weight_format.BLOCK:
        _require_refusal(partial(weight_format.quantize, weight[:, :-1], name="q_proj"), f"K={_COLUMNS - 1}")


def equals_its_copy(weight_format: Format) -> None:
    """Raise AssertionError unless a copy of the format is equal to the format and has the same hash."""
    twin: Any = replace(weight_format)
    assert {twin} == {weight_format}, "a copy of the format is not equal to the format"


def reads_its_config_back(weight_format: Format) -> None:
    """Raise AssertionError unless `recognize` reads format and ignored layers back from `quantization_config`.

    Formats without QUANT_METHOD are not checked.
    """
    if weight_format.QUANT_METHOD is None:
        return
    written = weight_format.quantization_config(["lm_head"], torch.bfloat16)
    assert written.get("quant_method") == weight_format.QUANT_METHOD, "quant_method is not QUANT_METHOD"
    found = weight_format.recognize(written)
    assert found is not None, "recognize returns None for its own quantization_config"
    assert isinstance(found.weight_format, type(weight_format)), f"it is recognized as {found.weight_format}"
    assert found.ignore == ("lm_head",), f"ignore=['lm_head'] is read as {found.ignore}"


LAWS: tuple[Callable[[Format], None], ...] = (
    packs_what_its_layout_says, gives_weights_back, decodes_what_it_stores, stores_its_bits, packs_rows_apart,
    packs_a_value_alike, refuses_unpackable_weights, equals_its_copy, reads_its_config_back,
)  # fmt: skip


def _test_weight() -> Tensor:
    """Make a test weight, float32 of SHAPE: normal values with one outlier and one row of zeros."""
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    weight[1, 7], weight[2] = 0.7, 0.0
    return weight


def _require_refusal(call: Callable[[], object], what: str) -> None:
    """Raise AssertionError unless `call` raises a ValueError that names the layer q_proj.

    `what` describes, for the message, the input that `call` must refuse.
    """
    try:
        call()
    except ValueError as error:
        refusal = str(error)
    else:
        raise AssertionError(f"{what} is not refused")
    assert "q_proj" in refusal, f"the error for {what} does not name the layer: {refusal}"


def _same_bytes(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Tell whether two sets of packed tensors have the same names, dtypes and bytes."""
    return left.keys() == right.keys() and all(
        left[key].dtype == right[key].dtype
        and torch.equal(left[key].contiguous().view(torch.uint8), right[key].contiguous().view(torch.uint8))
        for key in left
    )
