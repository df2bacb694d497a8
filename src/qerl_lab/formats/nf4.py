"""NF4 (QLoRA, arXiv 2305.14314, section 3 and appendix E), quantized and dequantized by bitsandbytes.

Sixteen quantiles of a normal distribution, scaled by the largest magnitude of each 64 consecutive elements of the
flattened weight. With double quantization (QLoRA's default) those magnitudes, less their mean, are held in 8 bits in
blocks of 256. One huge outlier then spoils the whole tensor, not just its block: the mean is of its size.

Only the functional API is used: `Linear4bit` repacks its weight on a CPU in eval mode. bitsandbytes is imported on
first use.
"""

import copy
import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qerl_lab.formats.codecs import Decoder, Layout, check_layout, check_weight

if TYPE_CHECKING:
    from bitsandbytes.functional import QuantState

NAME: str = "nf4"
BLOCK = 64
QUANT_METHOD: str | None = "bitsandbytes"
OPTIONS: tuple[str, ...] = ("double_quant",)

_NESTED_BLOCK = 256
_HEADER = "weight.quant_state.bitsandbytes__nf4"
_HEADER_BYTES = 256


def bits_per_weight(*, double_quant: bool = True) -> float:
    """4 bits and per block of 64 a float32 (4.5), or a byte and a float32 per 256 blocks (4.127)."""
    block_bits = 8 + 32 / _NESTED_BLOCK if double_quant else 32
    return 4 + block_bits / 64


def shared_options(weights: Sequence[Tensor], **options: Any) -> dict[str, Any]:
    """Nothing: every block stands alone."""
    return {}


def quantize(weight: Tensor, *, name: str = "weight", double_quant: bool = True) -> dict[str, Tensor]:
    """Pack `weight[N, K]`, N*K divisible by 64 (blocks run over the flattened weight, so they may cross rows).

    Returns the tensors of a bitsandbytes checkpoint: `weight` uint8 `[N*K/2, 1]` (HIGH nibble = even element),
    `weight.absmax` (uint8 if `double_quant`, else float32) `[N*K/64]`, `weight.quant_map` float32 `[16]`,
    `weight.nested_absmax`, `weight.nested_quant_map` if `double_quant`, and a JSON header in uint8 `[256]`.
    Raises ValueError, naming `name`, for another shape or dtype and for NaN or Inf.
    """
    from bitsandbytes.functional import quantize_4bit

    weight = check_weight(weight, name=name, format_name=NAME)
    if weight.numel() % BLOCK:
        raise ValueError(
            f"{name}: N*K={weight.numel()} is not divisible by {BLOCK}, the block of {NAME}; "
            f"allowed: multiples of {BLOCK}. Leave this layer out (ignore) or choose a format with another block"
        )
    codes, state = quantize_4bit(weight, blocksize=BLOCK, compress_statistics=double_quant, quant_type="nf4")
    tensors = {f"weight.{key}": tensor.clone() for key, tensor in state.as_dict(packed=True).items()}
    tensors[_HEADER] = _padded(tensors[_HEADER])
    return {"weight": codes, **tensors}


def dequantize(packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight `[N, K]`: code * absmax in float32, rounded once to `dtype`. Reads the JSON header on the host."""
    return decoder(packed, shape).unpack(dtype)


def decoder(packed: dict[str, Tensor], shape: tuple[int, int]) -> Decoder:
    """`dequantize` for a Linear, with the JSON header read once; there is no tensor scale to hold back."""
    from bitsandbytes.functional import QuantState

    codes = packed["weight"]
    state = QuantState.from_dict({key: tensor for key, tensor in packed.items() if key != "weight"}, codes.device)
    # One block a row: the AVX-512 kernel of bitsandbytes 0.50 takes a wrong scale where a block crosses rows, that is
    # where K is no multiple of 64 (seen at K=160: accuracy 0.49 became 0.11). Blocks run over the flattened weight.
    state.shape = torch.Size((codes.numel() * 2 // BLOCK, BLOCK))
    states = {dtype: copy.copy(state) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    for dtype, own in states.items():
        own.dtype = dtype
    return Decoder(partial(_unpacked, codes, states, shape))


def layout(shape: tuple[int, int], *, double_quant: bool = True) -> Layout:
    """Codes, scales, tables and header as in `quantize`."""
    blocks = shape[0] * shape[1] // BLOCK
    single: Layout = {
        "weight": ((blocks * BLOCK // 2, 1), torch.uint8),
        "weight.absmax": ((blocks,), torch.uint8 if double_quant else torch.float32),
        "weight.quant_map": ((16,), torch.float32),
    }
    nested: Layout = {
        "weight.nested_absmax": ((-(-blocks // _NESTED_BLOCK),), torch.float32),
        "weight.nested_quant_map": ((256,), torch.float32),
    }
    return single | (nested if double_quant else {}) | {_HEADER: ((_HEADER_BYTES,), torch.uint8)}


def accept(
    packed: dict[str, Tensor], shape: tuple[int, int], *, name: str, double_quant: bool = True
) -> dict[str, Tensor]:
    """`packed` with the header padded as `quantize` pads it. Raises ValueError, naming the tensor, for another layout
    and for a header that speaks of another weight."""
    header = packed[_HEADER]
    if header.dtype is not torch.uint8 or header.ndim != 1 or header.numel() > _HEADER_BYTES:
        raise ValueError(f"{name}.{_HEADER} is {header.dtype} {list(header.shape)}; allowed: JSON in at most 256 bytes")
    _check_header(bytes(header.tolist()), shape, name=name, double_quant=double_quant)
    layout_of_both = layout(shape, double_quant=double_quant)
    return check_layout(packed | {_HEADER: _padded(header)}, layout_of_both, name=name, format_name=NAME)


def _check_header(text: bytes, shape: tuple[int, int], *, name: str, double_quant: bool) -> None:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name}.{_HEADER} is not JSON: {error}") from error
    expected = {"quant_type": NAME, "blocksize": BLOCK, "shape": list(shape)}
    expected |= {"nested_blocksize": _NESTED_BLOCK} if double_quant else {}
    for key, value in expected.items():
        if found.get(key) != value:
            raise ValueError(f"{name}.{_HEADER} says {key}={found.get(key)}; allowed: {value}")


def _unpacked(
    codes: Tensor, states: "dict[torch.dtype, QuantState]", shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(codes, states[dtype]).reshape(shape)


def _padded(header: Tensor) -> Tensor:
    """The JSON bytes with spaces behind: its length depends on the digits of a float, a buffer's shape must not."""
    padded = torch.full((_HEADER_BYTES,), ord(" "), dtype=torch.uint8, device=header.device)
    padded[: header.numel()] = header
    return padded
