"""An NVFP4 product for few rows, with the adapter's in the same two launches. Importing this module imports triton.

    y = x W^T + bias + (x A^T) B^T,   W = E2M1 value * block scale / divisor, in the trainer's own row-major layout

At a few rows the product takes as long as the weights take to move, if unpacking keeps up: per weight a multiprocessor
of an H200 then has four issue slots. The first launch cuts N and K into tiles; a thread holds whole blocks of
16 weights as 64-bit words, whose bytes need no exchange between threads: a word and its neighbour become 16 registers
of two weights, by shifts and masks, times the two block scales. Nibble j of all blocks times column j of all blocks of
x is one product on the tensor cores. Programs beside these compute the pieces of x A^T. The second launch adds up the
pieces of K, the bias and the adapter's product, and rounds once.

Nothing here repacks a weight: one copy of the base could serve engine and trainer. For that is still needed
- speed: on an H200 it moves 0.8 TB/s of weights at 8 rows and 0.4 at 32, half of Humming (docs/speed.md);
- a product for more rows on the same layout (a batch above 32, prefill): the trainer's own, dequantize and cuBLAS, from
  some hundreds of rows on; in between this kernel with more columns of x a tile;
- vLLM's layer pointed at the trainer's tensors in place of loading its own: q/k/v and gate/up lie in one tensor there,
  so the trainer's layers would become slices of it (rows of a row-major tensor are contiguous; blocks never cross
  rows), and their divisors are one already (`Nvfp4.together`);
- the same for MXFP4 (a 32-block is two words, its scale a shift) and for layers without an adapter.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_lab.formats.kernels import from_e2m1
from qerl_lab.rollout.vllm.kernels import (
    BLOCK_K,
    BLOCK_N,
    BLOCK_R,
    MAX_RANK,
    PROGRAMS,
    WIDEN,
    expand_tile,
    place,
    product,
    shrink_tile,
    tiles_of,
)

MAX_ROWS = 32
# Not tuned yet. Rows of x a tile -> columns of y a tile, warps. As Triton 3.6 compiles them for sm_90 they take 3.8,
# 4.4 and 5.2 issue slots a weight, 2.0, 2.3 and 2.1 of them in the integer pipe; at 4.3 TB/s, all that an H200 moves, a
# weight has 3.9 and 1.9. Larger tiles take the weights through shared memory.
_TILES = {8: (32, 2), 16: (32, 2), 32: (64, 4)}
_BLOCKS = 16  # blocks of K a step: 256 weights of a row
_WAVES = 4  # programs a multiprocessor, by pieces of K where N has too few tiles
# A block scale times 2**119 is a bfloat16; times the unpacked value, which is 2**-126 too small, 2**-7 remain.
_2_TO_119, _2_TO_120 = tl.constexpr(2.0**119), tl.constexpr(2.0**120)


def unpack_assembly() -> str:
    """PTX that makes of two blocks, $16 and $17, and their scales, $18, the 16 pairs of weights $0 to $15."""
    lines = [".reg .b32 a<2>, b<2>, h<4>, t, u;", "mov.b64 {a0, a1}, $16;", "mov.b64 {b0, b1}, $17;"]
    for i in range(4):  # four nibbles of the first block below those of the second
        lines.append(f"prmt.b32 h{i}, a{i // 2}, b{i // 2}, {('0x5410', '0x7632')[i % 2]};")
    for j in range(16):
        half, nibble = f"h{j // 4}", j % 4
        shift = 6 - 4 * nibble  # eem to the lowest bits of the exponent and the highest of the mantissa; s to the top
        lines += [
            f"{'shl' if shift > 0 else 'shr'}.b32 t, {half}, {abs(shift)};", "and.b32 t, t, 0x01C001C0;",
            f"shl.b32 u, {half}, {12 - 4 * nibble};", "and.b32 u, u, 0x80008000;", "or.b32 t, t, u;",
            f"mul.rn.bf16x2 ${j}, t, $18;",
        ]  # fmt: skip
    return "\n".join(["{", *lines, "}"])


_ASSEMBLY = tl.constexpr(unpack_assembly())
_REGISTERS = tl.constexpr("=r," * 16 + "l,l,r")


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, divisor: Tensor, A: Tensor, B: Tensor, sizes: list[int],
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y `[M, N]` in the dtype of x, bfloat16, for at most `MAX_ROWS` rows.

    Args:
        x: `[M, K]`, K divisible by 16, rows aligned to 16 bytes; its columns lie side by side.
        codes: uint8 `[N, K/2]`, low nibble = even column, contiguous.
        scale: float8_e4m3fn `[N, K/16]`, contiguous.
        divisor: float32 `[1]`, the global scale as it is stored.
        A, B, sizes: as in `product.add_adapter`.
        bias: `[N]`.

    Raises ValueError for more rows, or a higher rank than `kernels.MAX_RANK`.
    """
    (rows, columns), N, R, rank = x.shape, codes.shape[0], A.shape[0], B.shape[1]
    if rows > MAX_ROWS or rank > MAX_RANK:
        raise ValueError(f"{rows} rows, rank {rank}; allowed: up to {MAX_ROWS} rows, rank {MAX_RANK}")
    block_m = max(8, triton.next_power_of_2(rows))
    block_n, warps = _TILES[block_m]
    tiles, blocks, wanted = triton.cdiv(N, block_n), columns // 16, PROGRAMS * _WAVES
    chunk, splits = _pieces(blocks, _BLOCKS, wanted // tiles)
    chunk_a, splits_a = _pieces(columns, BLOCK_K, PROGRAMS // triton.cdiv(R, BLOCK_R))
    sums = torch.empty(splits, rows, N, dtype=torch.float32, device=x.device)
    inner = torch.empty(splits_a, rows, R, dtype=torch.float32, device=x.device)
    of_adapter = splits_a * triton.cdiv(R, BLOCK_R)
    _products[(of_adapter + tiles * splits,)](
        x, codes.view(torch.int64), scale.view(torch.uint8), A, sums, inner, rows, N, R, blocks, tiles, chunk, chunk_a,
        splits_a, of_adapter, x.stride(0), BLOCK_M=block_m, BLOCK_N=block_n, BLOCKS=_BLOCKS,
        WHOLE=blocks % _BLOCKS == 0, BLOCK_R=BLOCK_R, BLOCK_K=BLOCK_K, num_warps=warps, num_stages=4,
    )  # fmt: skip
    y = torch.empty(rows, N, dtype=x.dtype, device=x.device)
    tiles, parts = tiles_of(sizes)
    _finish[(tiles,)](
        y, sums, inner, B, divisor, bias, rows, N, splits, splits_a, PARTS=parts, RANK=rank, BLOCK_M=block_m,
        BLOCK_R=max(16, triton.next_power_of_2(rank)), BLOCK_N=BLOCK_N, num_warps=4,
    )  # fmt: skip
    return y


def _pieces(length: int, step: int, wanted: int) -> tuple[int, int]:
    """Cut `length` into about `wanted` equal pieces of whole steps: the size of one, and how many there are."""
    size = triton.cdiv(triton.cdiv(length, max(1, wanted)), step) * step
    return size, triton.cdiv(length, size)


@triton.jit(do_not_specialize=["rows", "splits_a", "of_adapter"])
def _products(
    x, codes, scale, A, sums, inner, rows, N, R, blocks, tiles, chunk, chunk_a, splits_a, of_adapter, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The first programs: a piece of x A^T each. The others: a piece of x W^T, in float32 and times 2**-7 * divisor."""
    program = tl.program_id(0)
    if program < of_adapter:
        split, tile = program % splits_a, program // splits_a
        shrink_tile(x, A, inner, split, tile, 0, rows, R, blocks * 16, chunk_a, x_stride, BLOCK_M, BLOCK_R, BLOCK_K)
    else:
        split, tile = (program - of_adapter) // tiles, (program - of_adapter) % tiles
        n, m = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        end = tl.minimum(blocks, (split + 1) * chunk)
        # The last row stands in for those beyond it, whose products are not stored: a mask costs a tenth of the loop.
        of_w = tl.minimum(n, N - 1).to(tl.int64)[:, None] * blocks
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for first in range(split * chunk, end, BLOCKS):
            g = first + tl.arange(0, BLOCKS)
            at = of_w + g[None, :]
            if WHOLE:
                weights = _unpack(tl.load(codes + at), tl.load(scale + at))
            else:
                inside = g[None, :] < end
                weights = _unpack(tl.load(codes + at, mask=inside, other=0), tl.load(scale + at, mask=inside, other=0))
            of_blocks = 16 * g[None, :, None] + tl.arange(0, 16)[None, None, :]
            wanted = (m[:, None, None] < rows) & (g[None, :, None] < end)
            columns = _by_position(tl.load(x + m[:, None, None] * x_stride + of_blocks, mask=wanted, other=0.0))
            for j in tl.static_range(16):
                total = product(weights[j], columns[j].T, total)
        out = sums + (split * rows + m[None, :]) * N + n[:, None]
        tl.store(out, total, mask=(m[None, :] < rows) & (n[:, None] < N))


@triton.jit
def _unpack(words, scale):
    """Nibble j of blocks [BLOCK_N, BLOCKS], times scale times 2**-7, exact in bfloat16, for j = 0 to 15.

    Scales are positive, as every quantizer writes them; a NaN would count as 480.
    """
    exponent_and_mantissa = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True)  # times 2**-120
    scale = (exponent_and_mantissa * _2_TO_120 * _2_TO_119).to(tl.bfloat16)
    if WIDEN:
        return (
            _nibble(words, scale, 0), _nibble(words, scale, 1), _nibble(words, scale, 2), _nibble(words, scale, 3),
            _nibble(words, scale, 4), _nibble(words, scale, 5), _nibble(words, scale, 6), _nibble(words, scale, 7),
            _nibble(words, scale, 8), _nibble(words, scale, 9), _nibble(words, scale, 10), _nibble(words, scale, 11),
            _nibble(words, scale, 12), _nibble(words, scale, 13), _nibble(words, scale, 14), _nibble(words, scale, 15),
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            _ASSEMBLY, _REGISTERS, [words, scale], dtype=(tl.bfloat16,) * 16, is_pure=True, pack=2
        )


@triton.jit
def _nibble(words, scale, j):
    """What the assembly gives, for the interpreter, which runs none."""
    value = from_e2m1(((words >> (4 * j)) & 15).to(tl.int32)) * 1.1754943508222875e-38  # 2**-126
    return (value * scale.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _by_position(x):
    """Element j of all blocks of x[M, BLOCKS, 16], for j = 0 to 15."""
    even, odd = _halves(x, 8)
    x_0, x_2 = _halves(even, 4)
    x_1, x_3 = _halves(odd, 4)
    x_0, x_4 = _halves(x_0, 2)
    x_1, x_5 = _halves(x_1, 2)
    x_2, x_6 = _halves(x_2, 2)
    x_3, x_7 = _halves(x_3, 2)
    x_0, x_8 = tl.split(x_0)
    x_1, x_9 = tl.split(x_1)
    x_2, x_10 = tl.split(x_2)
    x_3, x_11 = tl.split(x_3)
    x_4, x_12 = tl.split(x_4)
    x_5, x_13 = tl.split(x_5)
    x_6, x_14 = tl.split(x_6)
    x_7, x_15 = tl.split(x_7)
    return x_0, x_1, x_2, x_3, x_4, x_5, x_6, x_7, x_8, x_9, x_10, x_11, x_12, x_13, x_14, x_15


@triton.jit
def _halves(x, HALF: tl.constexpr):
    """The even and the odd of the last axis."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1], HALF, 2)))


@triton.jit(do_not_specialize=["rows", "splits", "splits_a"])
def _finish(
    y, sums, inner, B, divisor, bias, rows, N, splits, splits_a,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (tile of one part's columns): add up both products' pieces, the bias, and round."""
    part, first, end = place(tl.program_id(0), PARTS, BLOCK_N)
    n, m = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    inside = (m[:, None] < rows) & (n[None, :] < end)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for s in range(splits):
        total += tl.load(sums + (s * rows + m[:, None]) * N + n[None, :], mask=inside, other=0.0)
    total *= 128 / tl.load(divisor)
    if bias is not None:
        total += tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
    total = expand_tile(total, inner, B, m, n, part, end, rows, splits_a, len(PARTS), RANK, BLOCK_R)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)
