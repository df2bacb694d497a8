"""NVFP4: E2M1 values, one E4M3 scale per 16 of a row, one float32 scale per tensor.

    weight ~ value * weight_scale / weight_global_scale

Rule, bit for bit that of compressed-tensors 0.17 (preset NVFP4A16, round to nearest, min-max observer):
- global scale = 448 * 6 / max|weight|, stored as a divisor; 1 where that overflows (all zeros): `generate_gparam`;
- block scale = E4M3(global scale * max|block| / 6), 0.125 where that is zero: `calculate_qparams`;
- code = E2M1(weight / (block scale / global scale)): `quantize`, `cast_to_fp4`, `pack_fp4_to_uint8`.
As there, 448 * 6 / max and max / 6 are taken in the dtype of the weight, so a bfloat16 tensor and its float32 copy may
differ in their scales. A tensor whose largest magnitude is below 448 * 6 / 3.4e38 = 7.9e-36 becomes zeros.

A later choice of the block maximum (6 or 4 per block) is a new option of `quantize`; the layout would not change.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qerl_lab.formats import e2m1
from qerl_lab.formats.codecs import Decoder, Layout, check_layout, check_weight

NAME: str = "nvfp4"
BLOCK = 16
QUANT_METHOD: str | None = "compressed-tensors"

E4M3_MAX = 448.0
_SCALE_OF_ZERO_BLOCK = 0.125  # any positive value would do, this one is what compressed-tensors writes


def bits_per_weight() -> float:
    """4 bits and a byte per 16: 4.5 (the global scale adds 4 bytes a tensor)."""
    return 4 + 8 / 16


def shared_options(weights: Sequence[Tensor]) -> dict[str, Tensor]:
    """One `global_scale` for the parts of a fused layer: engines keep a single one for q/k/v and for gate/up."""
    return {"global_scale": global_scale(weights)}


def global_scale(weights: Sequence[Tensor]) -> Tensor:
    """The divisor that brings the largest magnitude of all `weights` (one dtype) to 448 * 6; float32 `[1]`."""
    largest = torch.stack([weight.detach().abs().max() for weight in weights]).max()
    if largest.dtype is torch.float16:
        largest = largest.float()  # the quotient below overflows in float16
    divisor = E4M3_MAX * e2m1.MAX / largest.clamp(min=torch.finfo(largest.dtype).tiny)
    return torch.nan_to_num(divisor, nan=1.0, posinf=1.0).float().reshape(1)


def quantize(weight: Tensor, *, name: str = "weight", global_scale: Tensor | None = None) -> dict[str, Tensor]:
    """Pack `weight[N, K]`, K divisible by 16.

    `global_scale` (float32 `[1]`) replaces the tensor's own. Returns `weight_packed` uint8 `[N, K/2]` (low nibble =
    even column), `weight_scale` float8_e4m3fn `[N, K/16]`, `weight_global_scale` float32 `[1]`. Raises ValueError,
    naming `name`, for another shape or dtype, for NaN or Inf, and for a global scale that is not positive and finite.
    """
    weight = check_weight(weight, name=name, format_name=NAME, block=BLOCK)
    divisor = shared_options([weight])["global_scale"] if global_scale is None else global_scale
    if divisor.shape != (1,) or not 0 < divisor.item() < float("inf"):
        raise ValueError(f"{name}: global_scale must be one positive finite number of shape [1], got {divisor}")
    divisor = divisor.to(weight.device, torch.float32, copy=True)
    blocks = weight.unflatten(1, (-1, BLOCK))
    scale = (divisor * (blocks.abs().amax(-1) / e2m1.MAX)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    scale = torch.where(scale.float() == 0, _SCALE_OF_ZERO_BLOCK, scale.float())
    codes = e2m1.encode(blocks / (scale / divisor).unsqueeze(-1)).flatten(1)
    return {
        "weight_packed": e2m1.pack(codes),
        "weight_scale": scale.to(torch.float8_e4m3fn),
        "weight_global_scale": divisor,
    }


def dequantize(packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """value * (scale / global scale) in float32, rounded once to `dtype`; `[N, K]`. Equal to compressed-tensors'."""
    scale = packed["weight_scale"].float() / packed["weight_global_scale"]
    return _scaled(packed["weight_packed"], scale, shape).to(dtype)


def decoder(packed: dict[str, Tensor], shape: tuple[int, int]) -> Decoder:
    """W' = value * block scale and alpha = 1 / global scale, the numerics of the engines (Marlin).

    W' has at most six significant bits and is 0 or within 2**-10 and 2688: exact in bfloat16, float16 and float32.
    """
    alpha = packed["weight_global_scale"].reciprocal().item()
    return Decoder(partial(_unscaled, packed["weight_packed"], packed["weight_scale"], shape), alpha)


def layout(shape: tuple[int, int]) -> Layout:
    """Codes and scales as in `quantize`."""
    rows, columns = shape
    return {
        "weight_packed": ((rows, columns // 2), torch.uint8),
        "weight_scale": ((rows, columns // BLOCK), torch.float8_e4m3fn),
        "weight_global_scale": ((1,), torch.float32),
    }


def accept(packed: dict[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
    """`packed` if it is of this layout and its global scale a positive finite number; raises ValueError if not."""
    packed = check_layout(packed, layout(shape), name=name, format_name=NAME)
    if not 0 < (divisor := packed["weight_global_scale"].item()) < float("inf"):
        raise ValueError(f"{name}.weight_global_scale is {divisor}; allowed: positive finite numbers")
    return packed


def _unscaled(codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if codes.is_cuda:
        from qerl_lab.formats.kernels import dequantize_e2m1

        return dequantize_e2m1(codes, scale, shape, dtype)
    return _scaled(codes, scale.to(dtype), shape)


def _scaled(packed: Tensor, scale: Tensor, shape: tuple[int, int]) -> Tensor:
    """E2M1 values times the scale of their block, in the dtype of `scale`."""
    values = e2m1.decode(packed, scale.dtype).unflatten(1, (-1, BLOCK))
    return (values * scale.unsqueeze(-1)).reshape(shape)
