"""NVFP4: E2M1 values, one E4M3 scale per 16 elements of a row, one float32 scale per tensor.

    weight ~ value * weight_scale / weight_global_scale

`scale_rule=max` is bit-equal to compressed-tensors 0.17 (preset NVFP4A16, round to nearest, min-max observer):
- global scale = 448 * 6 / max|weight|, stored as a divisor; 1 where that overflows (all zeros): `generate_gparam`;
- block scale = E4M3(global scale * max|block| / 6), 0.125 where that is zero: `calculate_qparams`;
- code = E2M1(weight / (block scale / global scale)): `quantize`, `cast_to_fp4`, `pack_fp4_to_uint8`.
448 * 6 / max and max / 6 are computed in the dtype of the weight, as in compressed-tensors. So a bfloat16 tensor and
its float32 copy may get different scales. A tensor with magnitudes below 448 * 6 / 3.4e38 = 7.9e-36 becomes zeros.

`scale_rule=four_over_six` is "Four Over Six" (arXiv 2512.02010) with its squared-error selection, as in
`select_fouroversix` of github.com/mit-han-lab/fouroversix (src/fouroversix/quantize/pytorch/reference.py). E2M1 has no
value between 4 and 6, so some blocks do better if their maximum maps to 4. Each block is coded both ways, with the
scale above and with E4M3(global scale * max|block| / 4); the smaller sum of squared errors wins, 6 on a tie. The scale
for 4 is 1.5 times larger and would overflow 448 in the block that holds max|weight|. So the global scale is 256 * 6 /
max|weight|, as in the reference; that block's scales become 256 and 384, both exact. The range towards zero shrinks
1.75 times. A block is never worse than by `max` under the same global scale. Against `max` under its own global scale
single blocks may be better or worse, because E4M3 rounds them differently. Layout and decoding are unchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerl_lab.formats import e2m1
from qerl_lab.formats.compressed_tensors import E4M3_MAX, CompressedTensors
from qerl_lab.formats.format import Decoder, Layout, Quantize, checked

GLOBAL_SCALE = "weight_global_scale"  # name of its tensor in a checkpoint
# By rule, the block scale of the block with the tensor's largest magnitude; it maps this magnitude to 6.
_TOP_BLOCK_SCALE = {"max": E4M3_MAX, "four_over_six": 256.0}
SCALE_RULES = tuple(_TOP_BLOCK_SCALE)
_LARGEST_SCALE = 0x7E  # the bits of E4M3_MAX; larger bytes are NaN or negative
_SCALE_OF_ZERO_BLOCK = 0.125  # any positive value would do; compressed-tensors writes this one


@dataclass(frozen=True)
class Nvfp4(CompressedTensors):
    """NVFP4 with a choice of scales by `scale_rule`, one of `SCALE_RULES` (see the module); None: unpacks only."""

    NAME = "nvfp4"
    BLOCK = 16
    LAYOUT = "nvfp4-pack-quantized"
    SHARED = GLOBAL_SCALE
    STRATEGY = "tensor_group"
    SCALE_DTYPE = torch.float8_e4m3fn

    scale_rule: str | None

    def quantize(
        self, weight: Tensor, *, name: str = "weight", global_scale: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Pack `weight[N, K]`, K divisible by 16.

        Returns `weight_packed` uint8 `[N, K/2]` (low nibble = even column), `weight_scale` float8_e4m3fn `[N, K/16]`,
        `weight_global_scale` float32 `[1]`. `global_scale`, float32 `[1]` on the weight's device, is used if given;
        otherwise the method `global_scale` computes it from `weight`. Raises ValueError as that and `checked` do.
        """
        weight = checked(weight, self, name=name)
        global_scale = self.global_scale([weight]) if global_scale is None else global_scale.clone()
        blocks = weight.unflatten(1, (-1, self.BLOCK))
        scale = _block_scale(blocks, global_scale, e2m1.MAX)
        if self.scale_rule == "four_over_six":
            other = _block_scale(blocks, global_scale, 4.0)
            scale = torch.where(_error(blocks, global_scale, other) < _error(blocks, global_scale, scale), other, scale)
        packed = e2m1.pack(e2m1.encode(blocks / (scale / global_scale).unsqueeze(-1)).flatten(1))
        return {"weight_packed": packed, "weight_scale": scale.to(torch.float8_e4m3fn), GLOBAL_SCALE: global_scale}

    def fused_quantize(self, weights: Sequence[Tensor]) -> Quantize:
        """Return the function that packs each part of a fused layer with one global scale, computed from all `weights`.

        Engines keep one global scale per fused layer.
        """
        return partial(self.quantize, global_scale=self.global_scale(weights))

    def global_scale(self, weights: Sequence[Tensor]) -> Tensor:
        """Compute one global scale, a divisor float32 `[1]`, for all `weights` together.

        The result is 448 * 6 (`four_over_six`: 256 * 6) / largest magnitude, or 1 if that overflows, computed in
        bfloat16 if all `weights` are bfloat16, otherwise in float32. Raises ValueError for an unknown
        `scale_rule`.
        """
        if self.scale_rule not in SCALE_RULES:
            raise ValueError(f"unknown scale_rule {self.scale_rule!r}; allowed: {', '.join(SCALE_RULES)}")
        maxima = [weight.detach().abs().max() for weight in weights]
        if any(maximum.dtype != torch.bfloat16 for maximum in maxima):
            maxima = [maximum.float() for maximum in maxima]  # the quotient below overflows in float16
        largest = torch.stack(maxima).max()
        global_scale = _TOP_BLOCK_SCALE[self.scale_rule] * e2m1.MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        return torch.nan_to_num(global_scale, nan=1.0, posinf=1.0).float().reshape(1)

    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack packed tensors to `[N, K]`: value * (scale / global scale) in float32, rounded once to `dtype`."""
        scale = packed["weight_scale"].float() / packed[GLOBAL_SCALE]
        return e2m1.scaled(packed["weight_packed"], scale).to(dtype)

    def decoder(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return a decoder with W' = E2M1 value * block scale, alpha = 1 / global scale, as the engines' kernels do.

        W' is exact in bfloat16, float16 and float32: it has at most six significant bits, and its magnitude is 0 or
        from 2**-10 to 2688.
        """
        alpha = packed[GLOBAL_SCALE].reciprocal().item()
        return Decoder(partial(e2m1.dequantize, packed["weight_packed"], packed["weight_scale"]), alpha)

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype of the tensors of codes, block scales and global scale, by name."""
        return super().layout(shape) | {GLOBAL_SCALE: ((1,), torch.float32)}

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Check tensors that another program packed; return those that `layout` lists.

        Raises ValueError, naming the tensor, for a shape or dtype other than in `layout(shape)`, for a global scale
        that is not positive and finite, and for block scales that are negative or NaN. The engines' kernels ignore the
        sign of a block scale; the trainer would not.
        """
        accepted = super().accept(packed, shape, name=name)
        global_scale = accepted[GLOBAL_SCALE].item()
        if not 0 < global_scale < float("inf"):
            raise ValueError(f"{name}.weight_global_scale is {global_scale}; allowed: positive finite numbers")
        if (accepted["weight_scale"].view(torch.uint8) > _LARGEST_SCALE).any():
            raise ValueError(f"{name}.weight_scale has negative numbers or NaN; allowed: 0 to {E4M3_MAX:g}")
        return accepted


def _block_scale(blocks: Tensor, global_scale: Tensor, top: float) -> Tensor:
    """Compute block scales, rounded to E4M3, in float32 `[N, K/16]`. A scale that would be 0 becomes 0.125.

    With its scale the largest magnitude of a block in `blocks[N, K/16, 16]` becomes `top`, which is 6 or 4.
    """
    scale = (global_scale * (blocks.abs().amax(-1) / top)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scale == 0, _SCALE_OF_ZERO_BLOCK, scale)


def _error(blocks: Tensor, global_scale: Tensor, scale: Tensor) -> Tensor:
    """Compute each block's squared rounding error `[N, K/16]` with block scales `scale`.

    The error is multiplied by `global_scale` squared, so that nothing overflows float32. It is summed in float64, so
    that the order in which a device adds the sixteen squares does not matter.
    """
    exact = blocks / (scale / global_scale).unsqueeze(-1)
    rounded = e2m1.decode(e2m1.pack(e2m1.encode(exact).flatten(1)), torch.float32).view_as(exact)
    return ((rounded - exact) * scale.unsqueeze(-1)).square().sum(-1, dtype=torch.float64)
