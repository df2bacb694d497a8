"""Triton kernels of one adapter's product for few rows, as in decoding. Importing this module imports triton.

Two launches a layer: `shrink`, t = x A^T, and `expand`, y += t B^T. At a few rows both move A and B once and compute
next to nothing, so a layer's K is cut into splits until there is a program for every multiprocessor.

The splits' sums go to a scratch tensor [S, M, R], and the last program of a tile to get there adds them up. So there is
no third launch, and `expand`, which has many more programs, reads each t once. The sums have one order, whoever is
last: the same inputs give the same bits, which sums by atomics would not. The counters by which the programs know that
they are last are zero again when a call ends (`counters`).

From Hopper on both may begin before the kernel ahead of them has ended ("programmatic dependent launch" of the CUDA
programming guide, `griddepcontrol` of the PTX ISA): starting takes as long as computing here.

- `gdc_wait` returns when the kernel ahead has ended and what it wrote can be read. Every program calls it before it
  writes, and before it reads what a step writes. So shrink ends after the kernel ahead of it, and expand, which waits
  for shrink, may read the y that this kernel wrote.
- `gdc_launch_dependents` lets the next kernel begin once every program has called it or ended. Shrink calls it after
  its own wait: all that came before shrink has then ended, a sync too, and expand may read B at once.
- Expand does not call it: the next kernel begins when its programs have ended.
"""

import os
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_RANK = 128


class Tiles(NamedTuple):
    """How a product is cut. Of `shrink`: rows and columns of x loaded at once, programs in flight at most. Of `expand`:
    rows and columns of y of a program, and its warps."""

    shrink_m: int
    shrink_k: int
    programs: int
    expand_m: int
    expand_n: int
    warps: int


# By the rows up to which they are taken; the last for all beyond. The fastest of TODO ways for a 7B layer, rank 32, on
# an H200 (LOG.md).
TILES = {16: Tiles(16, 128, 132, 16, 128, 4), 32: Tiles(16, 128, 132, 32, 128, 4), 64: Tiles(16, 128, 132, 64, 128, 4),
         256: Tiles(16, 128, 132, 64, 128, 4)}  # fmt: skip
BLOCK_R = 32
COUNTERS = 4096  # tiles of t of a call at most
IN_FLIGHT = tl.constexpr(8)
WIDEN = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # the interpreter has no product of bfloat16


def tiles_for(rows: int) -> Tiles:
    """The tiles of so many rows."""
    return TILES[min((most for most in TILES if rows <= most), default=max(TILES))]


@cache
def counters(device: torch.device) -> Tensor:
    """How many programs of each tile of t have arrived: zeros between two calls, which follow each other on a stream.

    Ask for them before a CUDA graph is captured: they must outlive it.
    """
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def shrink(x: Tensor, A: Tensor) -> Tensor:
    """Return t = x A^T `[M, R]` in the dtype of x, summed in float32.

    Args:
        x: `[M, K]` in bfloat16, float16 or float32; its columns lie side by side.
        A: `[R, K]`, contiguous, in the same dtype.
    """
    (rows, columns), R = x.shape, A.shape[0]
    how = tiles_for(rows)
    tiles = (triton.cdiv(R, BLOCK_R), triton.cdiv(rows, how.shrink_m))
    most = max(1, triton.cdiv(how.programs, tiles[0] * tiles[1]))
    chunk = triton.cdiv(triton.cdiv(columns, most), how.shrink_k) * how.shrink_k
    splits = triton.cdiv(columns, chunk)
    sums = torch.empty(splits, rows, R, dtype=torch.float32, device=x.device)
    t = torch.empty(rows, R, dtype=x.dtype, device=x.device)
    _shrink[(splits, *tiles)](
        x, A, sums, t, counters(x.device), rows, R, columns, chunk, x.stride(0), splits, BLOCK_M=how.shrink_m,
        BLOCK_R=BLOCK_R, BLOCK_K=how.shrink_k, num_warps=4, num_stages=4, **ahead(x),
    )  # fmt: skip
    return t


def expand(y: Tensor, t: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Add t_p B_p^T to the columns of part p of `y`, in place.

    Args:
        y: `[M, N]`; its columns lie side by side.
        t: `[M, P * r]`, contiguous, in the dtype of B.
        B: `[N, r]`, contiguous.
        sizes: columns of the P parts, N in sum.
    """
    rows, rank = y.shape[0], B.shape[1]
    how = tiles_for(rows)
    tiles, parts = tiles_of(sizes, how.expand_n)
    _expand[(tiles, triton.cdiv(rows, how.expand_m))](
        y, t, B, rows, y.stride(0), PARTS=parts, RANK=rank, BLOCK_M=how.expand_m,
        BLOCK_R=max(16, triton.next_power_of_2(rank)), BLOCK_N=how.expand_n, num_warps=how.warps, **ahead(y),
    )  # fmt: skip


def ahead(tensor: Tensor) -> dict[str, bool]:
    """Arguments of a launch on the tensor's device: whether it begins before the kernel ahead of it has ended."""
    able = tensor.is_cuda and _capability(tensor.device) >= (9, 0)
    return {"AHEAD": able, "launch_pdl": able}


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Asked once: 224 launches of a pass of 7B would ask torch each."""
    return torch.cuda.get_device_capability(device)


def tiles_of(sizes: list[int], block: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """Tiles of `block` columns of all parts; of each part its first tile, its first column, the one after its last."""
    tiles = [triton.cdiv(size, block) for size in sizes]
    return sum(tiles), tuple((sum(tiles[:p]), sum(sizes[:p]), sum(sizes[: p + 1])) for p in range(len(sizes)))


# A variant for each number of rows would be compiled while a CUDA graph is captured.
@triton.jit(do_not_specialize=["rows", "splits"])
def _shrink(
    x, A, sums, t, arrived, rows, R, K, chunk, x_stride, splits,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (split, tile of R, tile of M): store the sum of x A^T over one piece of K; the last one their sum."""
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
    at, inside = m[:, None] * R + r[None, :], (m[:, None] < rows) & (r[None, :] < R)
    tl.store(sums + split * rows * R + at, total, mask=inside)
    tl.debug_barrier()  # all threads have stored before one says so
    mine = arrived + tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)
    if tl.atomic_add(mine, 1, sem="acq_rel") == splits - 1:
        total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for s in tl.range(0, splits, loop_unroll_factor=IN_FLIGHT):
            # From L2, where the other programs' are.
            total += tl.load(sums + s * rows * R + at, mask=inside, other=0.0, cache_modifier=".cg")
        tl.store(t + at, total.to(t.dtype.element_ty), mask=inside)
        tl.atomic_xchg(mine, 0)


@triton.jit(do_not_specialize=["rows"])
def _expand(
    y, t, B, rows, y_stride,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Program (tile of one part's columns, tile of M): y += t B^T."""
    part, first, end = place(tl.program_id(0), PARTS, BLOCK_N)
    n, r = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    b = tl.load(B + n[:, None] * RANK + r[None, :], mask=(n[:, None] < end) & (r[None, :] < RANK), other=0.0)
    if AHEAD:
        tl.extra.cuda.gdc_wait()  # B is of the last sync, and may be read before
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = (m[:, None] < rows) & (n[None, :] < end)
    at = y + m[:, None].to(tl.int64) * y_stride + n[None, :]
    old = tl.load(at, mask=inside, other=0.0)
    of_part = t + m[:, None] * (len(PARTS) * RANK) + part * RANK + r[None, :]
    inner = tl.load(of_part, mask=(m[:, None] < rows) & (r[None, :] < RANK), other=0.0)
    tl.store(at, product(inner, b.T, old.to(tl.float32)).to(old.dtype), mask=inside)


@triton.jit
def place(tile, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The part that a tile of columns belongs to, the tile's first column, and the part's end."""
    part, first, end = 0, tile * BLOCK_N, PARTS[0][2]
    for p in tl.static_range(1, len(PARTS)):
        if tile >= PARTS[p][0]:
            part, first, end = p, PARTS[p][1] + (tile - PARTS[p][0]) * BLOCK_N, PARTS[p][2]
    return part, first, end


@triton.jit
def product(a, b, total):
    """total + a @ b, summed in float32."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")
