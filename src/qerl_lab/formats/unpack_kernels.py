"""Triton kernels that unpack NVFP4 and MXFP4 on an NVIDIA GPU. Importing this module imports triton.

The torch code in `nvfp4.py`, `mxfp4.py`, `marlin.py` and `tiles.py` is the reference; the kernels give the same bits.
They read 4.5 bits and write 16 per weight, so memory bandwidth is the limit. Blocks never cross rows, so `_unpack`
walks over the flattened weight. `_unpack_marlin` and `_unpack_tiles` read contiguous pieces of 512 bytes and write 256
bytes or more of a row at a time. `TRITON_INTERPRET=1` runs the kernels on a CPU, for tests.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCKS = tl.constexpr(256)  # scale blocks per program
_WARPS = 4
_LINES = tl.constexpr(8)  # lines of Marlin's layout, 16 columns each, per program
_SIGNS = tl.constexpr(-0x7FFF8000)  # 0x80008000 as int32


def dequantize_e2m1(codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Compute E2M1 value * block scale as `[N, K]` in `dtype`: float32, or bfloat16 (exact for both formats).

    Args:
        codes: uint8 `[N, K/2]`, low nibble = even column.
        scale: float8_e4m3fn `[N, K/16]` (NVFP4), or uint8 `[N, K/32]` (MXFP4, E8M0).
        shape: `(N, K)`.
    """
    out = torch.empty(shape, dtype=dtype, device=codes.device)
    blocks = scale.numel()
    if blocks:
        is_e8m0 = scale.dtype is torch.uint8
        codes, scale_bytes = codes.contiguous(), scale.contiguous().view(torch.uint8)
        grid = (triton.cdiv(blocks, _BLOCKS.value),)
        _unpack[grid](codes, scale_bytes, out, blocks, 32 if is_e8m0 else 16, is_e8m0, num_warps=_WARPS)
    return out


@triton.jit
def _unpack(codes, scale, out, blocks, WIDTH: tl.constexpr, E8M0: tl.constexpr):
    """Triton kernel of `dequantize_e2m1`: each program unpacks `_BLOCKS` of the `blocks` blocks of `WIDTH` weights.

    The scales are E8M0 if `E8M0` is True, else E4M3.
    """
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


def dequantize_marlin(codes: Tensor, scale: Tensor, boost: float, dtype: torch.dtype) -> Tensor:
    """Unpack an NVFP4 weight from Marlin's layout (`marlin.py`) to `[N, K]` in `dtype`.

    The global scale is not applied. `dtype` is float32 or bfloat16; both are exact.

    Args:
        codes: int32 `[K/16, 2 N]`, each row contiguous; may be a view of some columns of a fused layer's tensor.
        scale: `[K/16, N]`, E5M3 bytes in a tensor of dtype float8_e4m3fn; may also be a view of some columns of a
            fused layer's tensor.
        boost: the power of two by which vLLM multiplied the block scales. This function divides by it.
    """
    lines, N = scale.shape
    out = torch.empty((N, 16 * lines), dtype=dtype, device=codes.device)
    grid = (N // 64, triton.cdiv(lines, _LINES.value))
    factor = 2.0**105 / boost  # a float16 2^7 * boost is a scale of 1; the exponent's bias is 112 less than float32's
    scale_bytes = scale.view(torch.uint8)
    _unpack_marlin[grid](codes, scale_bytes, out, lines, codes.stride(0), scale.stride(0), factor, num_warps=_WARPS)
    return out


@triton.jit
def _unpack_marlin(codes, scale, out, lines, code_line, scale_line, factor):
    """Triton kernel of `dequantize_marlin`: each program unpacks 64 rows x (16 * `_LINES`) columns.

    A line is a row of `codes` and `scale`; it holds 16 columns of the weight. `code_line` and `scale_line` are the
    strides between lines. `marlin.py` explains the letters in the code.
    """
    tile, first = tl.program_id(0), tl.program_id(1) * _LINES
    w, c = tl.arange(0, 4)[:, None, None, None], tl.arange(0, 8)[None, :, None, None]
    line, r = first + tl.arange(0, _LINES)[None, None, :, None], tl.arange(0, 4)[None, None, None, :]
    at = line.to(tl.int64) * code_line + tile * 128 + 16 * c + 4 * r + w
    words = tl.load(codes + at, mask=line < lines, other=0)
    values = tl.join(_decode_nibbles(words, 0), _decode_nibbles(words, 2))  # w c S r b a h
    values = tl.permute(values, (0, 6, 1, 2, 4, 3, 5))  # w h c S b r a
    values = tl.reshape(values, (64, _LINES, 16))

    row, line = tl.arange(0, 64)[:, None], first + tl.arange(0, _LINES)[None, :]
    at = line.to(tl.int64) * scale_line + tile * 64
    at += 8 * (row & 7) + 4 * (row >> 5) + 2 * (row >> 3 & 1) + (row >> 4 & 1)
    bits = tl.load(scale + at, mask=line < lines, other=0).to(tl.int32) << 20
    values *= (bits.to(tl.float32, bitcast=True) * factor)[:, :, None]

    columns = 16 * lines
    column = 16 * first + tl.arange(0, 16 * _LINES)[None, :]
    dense = tl.reshape(values, (64, 16 * _LINES)).to(out.dtype.element_ty)
    at = (tile * 64 + row).to(tl.int64) * columns + column
    tl.store(out + at, dense, mask=column < columns)


@triton.jit
def _decode_nibbles(words, NIBBLE: tl.constexpr):
    """Decode four of the eight nibbles in each of Marlin's code words, int32, to float32; return `[..., 2, 2]`.

    Element [..., b, a] of the result is nibble NIBBLE + 4 a + b, where nibble 0 is the lowest. In each 16 rows of the
    weight, NIBBLE = 0 selects codes of the first 8 rows (h = 0 in `marlin.py`), NIBBLE = 2 of the last 8 (h = 1).
    """
    even = tl.join(from_e2m1(words >> 4 * NIBBLE), from_e2m1(words >> 4 * (NIBBLE + 1)))
    odd = tl.join(from_e2m1(words >> 4 * (NIBBLE + 4)), from_e2m1(words >> 4 * (NIBBLE + 5)))
    return tl.join(even, odd)


def dequantize_tiles(packed: Tensor, first: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Unpack rows `first` to `first + rows - 1` of an NVFP4 weight in the layout of `tiles.py`.

    Returns `[rows, columns]` in `dtype`: float32 or bfloat16, both exact. The global scale is not applied.

    Args:
        packed: the whole weight, uint8 from `tiles.pack`.
        first, rows: multiples of 64.
        columns: K of the weight, a multiple of 64.
    """
    _, depth, _, tile, _ = packed.shape
    out = torch.empty((rows, columns), dtype=dtype, device=packed.device)
    grid = (depth, rows // 64)  # programs side by side write the same rows
    _unpack_tiles[grid](packed.view(torch.int32), packed, out, first // 64, tile, columns, num_warps=_WARPS)
    return out


@triton.jit
def _unpack_tiles(codes, scale, out, block, tile, columns):
    """Triton kernel of `dequantize_tiles`: each program unpacks 64 rows x 128 columns.

    `block` is the number of 64-row blocks before the first row, `tile` the number of blocks per tile. `tiles.py`
    explains the letters in the code.
    """
    d, depth, block = tl.program_id(0), tl.num_programs(0), block + tl.program_id(1)
    place = ((block // tile).to(tl.int64) * depth + d) * 2 * tile + block % tile
    i, w = tl.arange(0, 2)[:, None, None, None, None], tl.arange(0, 4)[None, :, None, None, None]
    g, t = tl.arange(0, 8)[None, None, :, None, None], tl.arange(0, 4)[None, None, None, :, None]
    s = tl.arange(0, 4)[None, None, None, None, :]
    words = tl.load(codes + place * 576 + i * tile * 576 + w * 144 + 16 * g + 4 * t + s)
    scales = scale + place * 2304 + i * tile * 2304 + w * 576 + 512 + 8 * g + 0 * t + s  # 0 * t: layout as of words
    upper = tl.join(_decode_pair(words), _decode_pair(words << 6))  # i w g t s a b
    last = words << 1 & _SIGNS | words >> 4 & 0x00C000C0 | words >> 5 & 0x01000100
    lower = tl.join(_decode_pair(words << 3), _decode_pair(last))
    upper *= _decode_scale_byte(tl.load(scales))[:, :, :, :, :, None, None]
    lower *= _decode_scale_byte(tl.load(scales + 4))[:, :, :, :, :, None, None]
    values = tl.join(upper, lower).to(out.dtype.element_ty)  # i w g t s a b h
    dense = tl.reshape(tl.permute(values, (1, 7, 2, 0, 4, 6, 3, 5)), (64, 128))  # w h g i s b t a

    row, column = tl.program_id(1) * 64 + tl.arange(0, 64)[:, None], d * 128 + tl.arange(0, 128)[None, :]
    tl.store(out + row.to(tl.int64) * columns + column, dense, mask=column < columns)


@triton.jit
def _decode_pair(words):
    """Decode one E2M1 code of each 16-bit half of int32 words to float32, along a new last axis of 2, low half first.

    The code has its sign at bit 15 and its magnitude at bits 8 to 6 of the half; other bits are ignored.
    """
    return tl.join(_decode_code(words), _decode_code(words >> 16))


@triton.jit
def _decode_code(half):
    """Decode the E2M1 code with its sign at bit 15 and its magnitude at bits 8 to 6 of `half` to float32."""
    return ((half & 0x81C0) << 16).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _decode_scale_byte(byte):
    """Decode a scale byte of `tiles.py`, 5-bit exponent e above 3-bit mantissa m, to float32: (1 + m/8) 2^(e - 9)."""
    return ((byte.to(tl.int32) << 20) + (118 << 23)).to(tl.float32, bitcast=True)


@triton.jit
def from_e2m1(code):
    """Decode the E2M1 code in the low four bits of `code` to float32, exactly; other bits are ignored."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def from_e4m3(byte):
    """Decode an E4M3 byte to float32, exactly; 0x7F and 0xFF are NaN."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120: bias 127 in place of 7
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _from_e8m0(byte):
    """Decode an E8M0 byte to float32: 2 ** (byte - 127); 255 is NaN."""
    value = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    return tl.where(byte == 255, float("nan"), value)
