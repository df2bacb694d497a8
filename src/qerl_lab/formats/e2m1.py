"""E2M1, the 4-bit float of NVFP4 and MXFP4: 1 sign, 2 exponent, 1 mantissa bit (OCP MX v1.0, 5.3.3)."""

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = MAGNITUDES[-1]
_MIDPOINTS = tuple((low + high) / 2 for low, high in pairwise(MAGNITUDES))


def encode(values: Tensor) -> Tensor:
    """Round each value to the nearest E2M1 value, and return the codes (uint8 from 0 to 15, same shape).

    A tie goes to the even code. Magnitudes above 6 become 6. NaN gets code 0 without an error, so that callers must
    check for it. Bit 3 is the sign. A negative value that rounds to zero gets code 8, and an input of -0.0 gets code 0,
    as in `FP4_E2M1_DATA.cast_to_fp4` of compressed-tensors 0.17.
    """
    magnitudes = values.abs()
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for code, midpoint in enumerate(_MIDPOINTS):
        codes += magnitudes >= midpoint if code % 2 else magnitudes > midpoint
    return codes | (values < 0).to(torch.uint8) << 3


def pack(codes: Tensor) -> Tensor:
    """Pack E2M1 codes, uint8 `[N, K]`, into bytes `[N, K/2]`, even column in the low nibble."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def decode(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack bytes `[N, K/2]` to E2M1 values `[N, K]` in `dtype` (exact in every float dtype)."""
    return F.embedding(packed.to(torch.int32), _value_pairs(packed.device, dtype)).flatten(1)


def scaled(packed: Tensor, scale: Tensor) -> Tensor:
    """Unpack bytes `[N, K/2]` to E2M1 values and multiply them by block scales `[N, K/block]`.

    Returns `[N, K]` in the dtype of `scale`.
    """
    blocks = decode(packed, scale.dtype).unflatten(1, (scale.shape[1], -1))
    return (blocks * scale.unsqueeze(-1)).flatten(1)


def dequantize(packed: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack bytes `[N, K/2]` to E2M1 value * block scale: `[N, K]` in `dtype`. CPU and GPU give the same bits.

    `scale` `[N, K/block]` is float8_e4m3fn (NVFP4) or E8M0 as uint8 (MXFP4).
    """
    if packed.is_cuda:
        from qerl_lab.formats.unpack_kernels import dequantize_e2m1

        return dequantize_e2m1(packed, scale, (len(packed), 2 * packed.shape[1]), dtype)
    return scaled(packed, (scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale).to(dtype))


@cache
def _value_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a table `[256, 2]` with the two E2M1 values that each byte packs, low nibble first."""
    values = [sign * magnitude for sign in (1.0, -1.0) for magnitude in MAGNITUDES]
    return torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], dtype=dtype, device=device)
