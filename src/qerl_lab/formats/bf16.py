"""BF16, the dense baseline: weights rounded to bfloat16 (nearest, ties to even), nothing packed."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.formats.format import Format, Layout, checked


@dataclass(frozen=True)
class Bf16(Format):
    """Weights in bfloat16."""

    NAME = "bf16"
    BLOCK = None
    bits_per_weight = 16.0

    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Return `{"weight": bfloat16 [N, K]}`.

        Raises ValueError, naming `name`, unless `weight` is a matrix of finite floats below 2**100.
        """
        return {"weight": checked(weight, self, name=name).to(torch.bfloat16)}

    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the weight `[N, K]` in `dtype`; exact in bfloat16 and float32."""
        return packed["weight"].to(dtype).reshape(shape)

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype of the only tensor, `weight`."""
        return {"weight": (shape, torch.bfloat16)}
