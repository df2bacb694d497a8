"""Triton kernels for one adapter's product with few rows, as in decoding. Importing this module imports triton.

Letters: x is `[M, K]`, y `[M, N]`. A layer fuses P parts, such as q, k and v, each with an adapter of rank r. A stacks
their R = P * r rows.

Two launches per layer: `shrink`, t = x A^T, and `expand`, y += t B^T. With few rows both are bound by reading A and B
once, so a layer's K is cut into splits until every multiprocessor has a program. If a cuBLAS product already gave y and
t, only `expand` runs, with the scale and the bias of y.

The splits' sums go to a scratch tensor [S, M, R], and every program of `expand` adds up the S that it needs. This saves
a third launch and a buffer that one call must zero for the next, which an interrupted CUDA graph would break. The order
of the sums is fixed, so the same inputs give the same bits, unlike with atomics. The price is that expand reads t up to
`MOST_SPLITS` times, from L2.

From Hopper on both kernels may begin before the previous kernel has ended ("programmatic dependent launch" of the CUDA
programming guide, `griddepcontrol` of the PTX ISA), because a launch takes as long as the computation here.

- `gdc_wait` returns when the previous kernel has ended and its writes are visible. Every program calls it before it
  writes, and before it reads anything that changes within a step. So shrink ends after the kernel before it, and
  expand, which waits for shrink, may read the y of that kernel.
- `gdc_launch_dependents` lets the next kernel begin once every program has called it or ended. Shrink calls it after
  its own wait. Everything before shrink has then ended, a sync included, so expand may read B at once.
- Expand does not call it: the next kernel begins when its programs have ended.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

# Fastest of 31 variants, or within 2% of it, at 8 to 128 rows of a 7B layer, rank 32, on an H200 (LOG.md).
SHRINK_M = 16  # rows per program of shrink: the tensor cores' minimum
MOST_SPLITS = 32  # expand adds them up; half as many for more rows
PROGRAMS = 132  # multiprocessors of an H200
BLOCK_R = 32
IN_FLIGHT = tl.constexpr(8)
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no product of bfloat16


def shrink(x: Tensor, A: Tensor) -> Tensor:
    """Return t = x A^T as S partial sums, float32 `[S, M, R]`: t is their sum over the first axis.

    Each partial sum covers one range of the K columns of x and A.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32, columns contiguous.
        A: `[R, K]`, contiguous, in the same dtype.
    """
    (rows, columns), R = x.shape, A.shape[0]
    tiles = triton.cdiv(R, BLOCK_R) * triton.cdiv(rows, SHRINK_M)
    most = min(MOST_SPLITS if rows <= SHRINK_M else MOST_SPLITS // 2, triton.cdiv(PROGRAMS, tiles))
    block_k = block_k_of(rows)
    chunk = triton.cdiv(triton.cdiv(columns, most), block_k) * block_k
    splits = triton.cdiv(columns, chunk)
    sums = torch.empty(splits, rows, R, dtype=torch.float32, device=x.device)
    grid = (splits, triton.cdiv(R, BLOCK_R), triton.cdiv(rows, SHRINK_M))
    _shrink[grid](
        x, A, sums, rows, R, columns, chunk, x.stride(0), BLOCK_M=SHRINK_M, BLOCK_R=BLOCK_R, BLOCK_K=block_k,
        num_warps=4, num_stages=4, **launch_options(x.device),
    )  # fmt: skip
    return sums


def expand(
    y: Tensor, sums: Tensor, B: Tensor, sizes: list[int],
    alpha: float = 1.0, bias: Tensor | None = None, out: Tensor | None = None,
) -> None:  # fmt: skip
    """Add adapter and bias to the product `y` of a layer with P fused parts (e.g. q, k, v), each of rank r.

    Writes alpha * y + bias + t_p B_p^T to the columns of each part p of `out`. B_p are the rows of `B` for part p, and
    t_p are the r columns for part p of t = x A^T.

    Args:
        y: `[M, N]`, columns contiguous.
        sums: partial sums of t as from `shrink`, `[S, M, P * r]` of any dtype, columns contiguous. Their sum over S is
            rounded to the dtype of B.
        B: `[N, r]`, contiguous.
        sizes: number of columns of each part, N in total.
        bias: `[N]`, contiguous.
        out: the result, shaped like y; None overwrites y.
    """
    out = y if out is None else out
    rows, rank = y.shape[0], B.shape[1]
    block_m, block_n, warps = blocks_of(rows, y.shape[1])
    tiles, parts = tiles_of(sizes, block_n)
    _expand[(tiles, triton.cdiv(rows, block_m))](
        y, sums, B, bias, out, rows, sums.shape[0], y.stride(0), *sums.stride()[:2], out.stride(0), alpha,
        PARTS=parts, RANK=rank, BLOCK_M=block_m, BLOCK_R=max(16, triton.next_power_of_2(rank)), BLOCK_N=block_n,
        num_warps=warps, **launch_options(y.device),
    )  # fmt: skip


def block_k_of(rows: int) -> int:
    """Choose how many columns of x the kernel `_shrink` loads at once, if x has `rows` rows."""
    return 256 if rows <= SHRINK_M else 128


def blocks_of(rows: int, columns: int) -> tuple[int, int, int]:
    """Choose how many rows and columns of y `[rows, columns]` each program of `_expand` computes, and its warps.

    Every program adds up the partial sums of its rows again, so fewer and wider programs read less. For gate/up of a 7B
    at 64 rows, narrow programs would read 68 MB of sums for 10 MB of y. Programs are wide only where there are still
    two per multiprocessor.
    """
    if rows <= 16:
        return 16, 128, 4
    tiles = triton.cdiv(rows, 32)
    wide = next((wide for wide in (256, 128) if tiles * triton.cdiv(columns, wide) >= 2 * PROGRAMS), 64)
    return 32, wide, 8 if wide == 256 else 4


@cache
def launch_options(device: torch.device) -> dict[str, bool]:
    """Return Triton's launch arguments: from Hopper on they let a kernel begin before the previous one has ended.

    They are cached, because one forward pass of a 7B makes 224 launches.
    """
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"AHEAD": able, "launch_pdl": able}


def tiles_of(sizes: list[int], block: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Cut parts of `sizes` columns into tiles of at most `block` columns, so that each tile lies in one part.

    Returns the number of tiles, and for each part its first tile, its first column, and the column after its last.
    """
    tiles = [triton.cdiv(size, block) for size in sizes]
    return sum(tiles), tuple((sum(tiles[:p]), sum(sizes[:p]), sum(sizes[: p + 1])) for p in range(len(sizes)))


# Do not specialize on rows: a new variant would be compiled while a CUDA graph is captured.
@triton.jit(do_not_specialize=["rows"])
def _shrink(
    x, A, sums, rows, R, K, chunk, x_stride,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Triton kernel of `shrink`: a program sums x A^T over `chunk` columns, for BLOCK_M rows of x and BLOCK_R of A."""
    if AHEAD:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.minimum(K, (split + 1) * chunk)
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for first in range(split * chunk, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        a = tl.load(A + r[:, None] * K + k[None, :], mask=(r[:, None] < R) & (k[None, :] < end), other=0.0)
        rows_of_x = x + m[:, None].to(tl.int64) * x_stride
        some = tl.load(rows_of_x + k[None, :], mask=(m[:, None] < rows) & (k[None, :] < end), other=0.0)
        total = product(some, a.T, total)
    out = sums + (split * rows + m[:, None]) * R + r[None, :]
    tl.store(out, total, mask=(m[:, None] < rows) & (r[None, :] < R))


@triton.jit(do_not_specialize=["rows", "splits", "split_stride"])
def _expand(
    y, sums, B, bias, out, rows, splits, y_stride, split_stride, sums_stride, out_stride, alpha,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Triton kernel of `expand`: a program writes alpha y + bias + t B^T to BLOCK_M rows x BLOCK_N columns of `out`.

    t is the sum of `sums` over its first axis, of length `splits`. PARTS is the second result of `tiles_of`.
    """
    part, first, end = locate_tile(tl.program_id(0), PARTS, BLOCK_N)
    n, r = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    b = tl.load(B + n[:, None] * RANK + r[None, :], mask=(n[:, None] < end) & (r[None, :] < RANK), other=0.0)
    added = 0.0 if bias is None else tl.load(bias + n, mask=n < end, other=0.0).to(tl.float32)[None, :]
    if AHEAD:
        tl.extra.cuda.gdc_wait()  # B changes only in a sync and may be read before
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m[:, None] < rows) & (n[None, :] < end)
    old = tl.load(y + m[:, None].to(tl.int64) * y_stride + n[None, :], mask=inside, other=0.0)
    t = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for begin in tl.range(0, splits, IN_FLIGHT):  # fully unrolled, each load would change its layout
        for s in tl.static_range(IN_FLIGHT):  # masked, because a remainder loop would load one by one
            split = begin + s
            wanted = (m[:, None] < tl.where(split < splits, rows, 0)) & (r[None, :] < RANK)
            of_split = sums + split * split_stride + m[:, None] * sums_stride + part * RANK + r[None, :]
            t += tl.load(of_split, mask=wanted, other=0.0).to(tl.float32)
    total = product(t.to(b.dtype), b.T, old.to(tl.float32) * alpha + added)
    tl.store(out + m[:, None].to(tl.int64) * out_stride + n[None, :], total.to(old.dtype), mask=inside)


@triton.jit
def locate_tile(tile, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return, for tile number `tile`, the part that contains it, its first column, and the end (exclusive) of the part.

    PARTS is the second result of `tiles_of`.
    """
    part, first, end = 0, tile * BLOCK_N, PARTS[0][2]
    for p in tl.static_range(1, len(PARTS)):
        if tile >= PARTS[p][0]:
            part, first, end = p, PARTS[p][1] + (tile - PARTS[p][0]) * BLOCK_N, PARTS[p][2]
    return part, first, end


@triton.jit
def product(a, b, total):
    """Return total + a @ b, summed in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
