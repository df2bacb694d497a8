"""Triton kernels that unpack NVFP4 and MXFP4 on an NVIDIA GPU. Importing this module imports triton.

The bits are those of the pure torch code beside them (`nvfp4.py`, `mxfp4.py`), which is the reference. Blocks never
cross rows, so the kernel walks over the flattened weight; 4.5 bits are read and 16 written per weight, so memory is the
limit. `TRITON_INTERPRET=1` runs it on a CPU, for tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = tl.constexpr(256)  # scale blocks a program unpacks
_WARPS = 4


def dequantize_e2m1(codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """E2M1 value * block scale as `[N, K]` in `dtype`: float32, or bfloat16 (rounded once; exact for both formats).

    Args:
        codes: uint8 `[N, K/2]`, low nibble = even column.
        scale: float8_e4m3fn `[N, K/16]` (NVFP4), or uint8 `[N, K/32]` (MXFP4, E8M0).
        shape: `(N, K)`.
    """
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    blocks = scale.numel()
    if blocks:
        codes, scale, e8m0 = codes.contiguous(), scale.contiguous(), scale.dtype is torch.uint8
        grid = (triton.cdiv(blocks, _BLOCKS.value),)
        _unpack[grid](codes, scale.view(torch.uint8), out, blocks, 32 if e8m0 else 16, e8m0, num_warps=_WARPS)
    return out


@triton.jit
def _unpack(codes, scale, out, blocks, WIDTH: tl.constexpr, E8M0: tl.constexpr):
    """Each program unpacks `_BLOCKS` blocks of `WIDTH` weights."""
    first = tl.program_id(0).to(tl.int64) * _BLOCKS
    block = tl.arange(0, _BLOCKS)
    inside = first + block < blocks
    scales = tl.load(scale + first + block, mask=inside, other=0).to(tl.int32)
    scales = _from_e8m0(scales) if E8M0 else from_e4m3(scales)
    HALF: tl.constexpr = WIDTH // 2
    at = block[:, None] * HALF + tl.arange(0, HALF)[None, :]
    pairs = tl.load(codes + first * HALF + at, mask=inside[:, None], other=0).to(tl.int32)
    values = tl.join(from_e2m1(pairs), from_e2m1(pairs >> 4)) * scales[:, None, None]
    at = block[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    dense = tl.reshape(values, (_BLOCKS, WIDTH)).to(out.dtype.element_ty)
    tl.store(out + first * WIDTH + at, dense, mask=inside[:, None])


@triton.jit
def from_e2m1(code):
    """float32 of the low four bits: seeem is a float32 with exponent bias 127 in place of 1, subnormals included."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def from_e4m3(byte):
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: bias 127 in place of 7
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _from_e8m0(byte):
    value = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    return tl.where(byte == 255, float("nan"), value)
