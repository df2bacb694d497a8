"""An NVFP4 product for few rows, with the adapter's, in one launch of the kernel in fp4_linear.cu.

    y = x W^T + bias + (x A^T) B^T,   W = E2M1 value * block scale / divisor, in the trainer's own row-major layout

At a few rows the product should take as long as the weights take to move. The kernel is CUDA C++, which NVRTC compiles
once a process: Triton has no word for a block whose warps keep their columns of x in registers while the copy engine
streams rows of weights past them, and what came nearest there was no faster than a product without that (LOG.md).

Nothing here repacks a weight: one copy of the base could serve engine and trainer as it was stored (`one_copy` shares
Marlin's form). For that is still needed
- a product for more rows on the same layout: the trainer's own, dequantize and cuBLAS, from some hundreds of rows on;
  in between none that is fast;
- vLLM's layer pointed at the trainer's tensors in place of loading its own: q/k/v and gate/up lie in one tensor there,
  so the trainer's layers would become slices of it (rows of a row-major tensor are contiguous; blocks never cross
  rows), and their divisors are one already (`Nvfp4.together`);
- the same for MXFP4 (a 32-block is two words, its scale a shift) and for layers without an adapter.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")
# A tile of x. With the adapter a layer of 7B takes 90 microseconds at 8 rows on an H200, and 122 by Humming and the
# adapter's own kernels; with two tiles it took 145 at 16 rows, and they 127 (results/bench/decode_7b.json).
MAX_ROWS = 8
MAX_RANK = 128
LEAST_CAPABILITY = (9, 0)  # whose copy engine fills shared memory
NEEDS = "a GPU of compute capability 9.0 or more (H100, H200, B200)"
_WHOLE = 256  # what K is a multiple of: scales of so many columns are the least that the copy engine takes
_MOST_STAGES = 12
_THREADS, _SLICE, _TILE, _TURNS, _SUMS = 608, 256, 16, 4, 128  # as in fp4_linear.cu

TAKEN = f"up to 3 parts in multiples of {_TILE}, columns in multiples of {_WHOLE}, an even rank up to {MAX_RANK}"


class Shape(ctypes.Structure):
    """The struct of this name in fp4_linear.cu."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("M", "N", "K", "x_stride", "R", "rank", "part_1", "part_2", "pieces", "stages", "warps",
                     "code_row", "scale_row")
    ]  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """Multiprocessors of a GPU, and bytes of shared memory that a block may have on one."""

    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True)
class Plan:
    """How a launch cuts a weight [N, K]: `teams` of blocks share its rows, the `pieces` blocks of a team its columns.

    Of a block's warps `warps` multiply, one copies, and `closers` add up.
    """

    teams: int
    pieces: int
    warps: int
    closers: int
    stages: int
    code_row: int
    scale_row: int
    shared_bytes: int

    @property
    def blocks(self) -> int:
        return self.teams * self.pieces

    @property
    def threads(self) -> int:
        return 32 * (self.warps + 1 + self.closers)


def takes(sizes: Sequence[int], columns: int, rank: int) -> bool:
    """Whether `linear` takes a weight with parts of these sizes and K `columns`, and an adapter of this rank."""
    whole = columns % _WHOLE == 0 and all(size % _TILE == 0 for size in sizes)
    return whole and len(sizes) <= 3 and rank % 2 == 0 and rank <= MAX_RANK


def able() -> bool:
    """Whether this GPU has what the kernel needs."""
    return torch.cuda.get_device_capability() >= LEAST_CAPABILITY


def runs_here(sizes: Sequence[int], columns: int, rank: int) -> bool:
    """Whether the GPU is `able`, and `takes` says yes."""
    return able() and takes(sizes, columns, rank)


def counters(device: torch.device) -> Tensor:
    """What the blocks of a layer's launches meet by: int64 zeros, of this layer alone, written by `linear` only."""
    tiles = 3 * MAX_RANK // _TILE  # of x A^T
    return torch.zeros(1 + machine_of(device).multiprocessors + tiles, dtype=torch.int64, device=device)


def linear(
    x: Tensor, codes: Tensor, scale: Tensor, divisor: Tensor, A: Tensor, B: Tensor, sizes: list[int], meeting: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return y `[M, N]` in bfloat16 for at most `MAX_ROWS` rows.

    Args:
        x: bfloat16 `[M, K]`, rows aligned to 16 bytes; its columns lie side by side.
        codes: uint8 `[N, K/2]`, low nibble = even column, contiguous.
        scale: float8_e4m3fn `[N, K/16]`, contiguous; positive, as every quantizer writes them.
        divisor: float32 `[1]`, the global scale as it is stored.
        A, B, sizes: as in `product.add_adapter`, in bfloat16.
        meeting: the layer's `counters`.
        bias: bfloat16 `[N]`.

    Raises ValueError for more rows, or where `takes` says no.
    """
    (rows, columns), (N, rank) = x.shape, B.shape
    if rows > MAX_ROWS or not takes(sizes, columns, rank):
        what = f"{rows} rows of x, parts {sizes} x {columns}, rank {rank}"
        raise ValueError(f"{what}; allowed: up to {MAX_ROWS} rows, {TAKEN}")
    y = torch.empty(rows, N, dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return y
    how = plan(N, columns, machine_of(x.device))
    inner = torch.empty(-(-len(A) // _TILE) * (columns // _SLICE) * _SUMS, device=x.device)
    partial = torch.empty(N // _TILE * how.pieces * _SUMS if how.pieces > 1 else 0, device=x.device)
    ends = [sum(sizes[:part]) if len(sizes) > part else N for part in (1, 2)]
    shape = Shape(rows, N, columns, x.stride(0), len(A), rank, *ends, how.pieces, how.stages, how.warps, how.code_row,
                  how.scale_row)  # fmt: skip
    _launch(how, [x, codes, scale, divisor, A, B, bias, y, inner, partial, meeting], shape)
    return y


def plan(N: int, columns: int, machine: Machine) -> Plan:
    """Cut a weight [N, K] into pieces that the warps of a block can own, with a ring as large as memory allows.

    Rows are padded in shared memory: what neighbouring lanes read then never meets in a bank.
    """
    pieces = -(-columns // ((_THREADS // 32 - 2) * _SLICE))
    warps = -(-columns // (pieces * _SLICE))
    teams = min(machine.multiprocessors // pieces, N // _TILE)
    code_row, scale_row = warps * _SLICE // 2, warps * _SLICE // 16
    code_row, scale_row = code_row + (64 - code_row) % 128, scale_row + (16 - scale_row) % 32
    rest = _TURNS * warps * _SUMS * 4 + (2 * _MOST_STAGES + 2 * _TURNS) * 8 + MAX_ROWS * (3 * MAX_RANK + 8) * 2
    stages = min(_MOST_STAGES, (machine.shared_bytes - rest) // (_TILE * (code_row + scale_row)))
    closers = min(4, _THREADS // 32 - 1 - warps)
    return Plan(
        teams, pieces, warps, closers, stages, code_row, scale_row, stages * _TILE * (code_row + scale_row) + rest
    )


@cache
def machine_of(device: torch.device) -> Machine:
    """What the GPU has, asked once."""
    from qerl_lab.rollout.vllm import nvrtc  # needs cuda.bindings

    number = torch.cuda.current_device() if device.index is None else device.index
    return Machine(torch.cuda.get_device_properties(number).multi_processor_count, nvrtc.shared_bytes(number))


def _launch(how: Plan, tensors: Sequence[Tensor | None], shape: Shape) -> None:
    """Start the kernel on the current stream, which a CUDA graph may be capturing."""
    from qerl_lab.rollout.vllm import nvrtc  # needs cuda.bindings

    function = nvrtc.function(SOURCE, "fp4_linear", torch.cuda.current_device())
    nvrtc.launch(function, how.blocks, how.threads, how.shared_bytes, [*tensors, shape])
