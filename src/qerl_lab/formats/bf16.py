"""BF16: the dense baseline. The weights are rounded to bfloat16 (nearest, ties to even), nothing is packed."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats.codecs import Decoder, Layout, check_layout, check_weight

NAME: str = "bf16"
BLOCK: int | None = None
QUANT_METHOD: str | None = None
OPTIONS: tuple[str, ...] = ()


def bits_per_weight() -> float:
    """16."""
    return 16.0


def shared_options(weights: Sequence[Tensor], **options: Any) -> dict[str, Any]:
    """Nothing: there are no scales."""
    return {}


def quantize(weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
    """`{"weight": bfloat16 [N, K]}`. Raises ValueError, naming `name`, for another shape and for NaN or Inf."""
    return {"weight": check_weight(weight, name=name, format_name=NAME).to(torch.bfloat16)}


def dequantize(packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight `[N, K]` in `dtype`: exact in bfloat16 and float32."""
    return packed["weight"].to(dtype).reshape(shape)


def decoder(packed: dict[str, Tensor], shape: tuple[int, int]) -> Decoder:
    """`dequantize` for a Linear; there is no tensor scale to hold back."""
    return Decoder(partial(dequantize, packed, shape))


def layout(shape: tuple[int, int], **options: Any) -> Layout:
    """One dense tensor."""
    return {"weight": (shape, torch.bfloat16)}


def accept(packed: dict[str, Tensor], shape: tuple[int, int], *, name: str, **options: Any) -> dict[str, Tensor]:
    """`packed` if it is of this layout; raises ValueError, naming the tensor, if not."""
    return check_layout(packed, layout(shape), name=name, format_name=NAME)
