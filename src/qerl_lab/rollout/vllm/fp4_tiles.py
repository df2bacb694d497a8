"""NVFP4 product with an adapter for few rows, up to 64 per launch, on Hopper's warpgroup instructions.

    y = x W^T + bias + (x A^T) B^T,   W = E2M1 value * block scale / global scale

Letters: x is `[M, K]`, W `[N, K]`, y `[M, N]`. A layer fuses P parts, such as q, k and v, each with an adapter of rank
r. A stage is 128 columns of x and of a tile of W in shared memory.

From about ten rows on the product is bound by compute as well as by memory. Triton cannot unpack an operand into
registers while the previous product runs, and other NVFP4 kernels need extra launches for the adapter. This kernel
includes the adapter: it computes x A^T while weights are loading and adds (x A^T) B^T at the end.

W and x swap roles: the operand in registers is a tile of W, and the rows of x are the columns of the product. So 16
rows of x suffice for a product. The kernel is fp4_tiles.cu; `formats.tiles` documents the layout of W.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from qerl_lab.config.rules import TILES_MAX_RANK, TILES_RANKS, fp4_tiles_takes_rank
from qerl_lab.formats.format import ceil_div
from qerl_lab.formats.tiles import AT_A_TIME, BLOCK, BLOCK_BYTES, DEPTH, depth_of

SOURCE = Path(__file__).with_suffix(".cu")
CAPABILITY = (9, 0)  # the only one with these instructions
VARIANTS = (16, 32, 64)  # rows of x
MAX_ROWS = VARIANTS[-1]  # per launch
TILE_SIZES = range(2, 9)  # blocks of W per tile
_OUT_BYTES = 768  # as in fp4_tiles.cu
_GROUP = 128  # threads of a warpgroup
_OTHERS = 128  # threads of a block that do not multiply
_MOST_STAGES = 16
_RANKS = 32  # a part of x A^T is padded to a multiple of this
_STEP_OF_SPLIT = 64  # columns of x that a warp multiplies per trip to memory, for x A^T
_SUMS_AT_ONCE = 16  # sums of splits that it adds per trip
_MAKERS = 3  # warps of a block that compute x A^T
_STAGES_OF_END = 2  # the end of a tile costs about as much as this many stages

SUPPORTED = (
    f"up to 3 parts in multiples of {BLOCK}, columns in multiples of {DEPTH}, a rank in multiples of {TILES_RANKS} "
    f"up to {TILES_MAX_RANK}"
)


class Shape(ctypes.Structure):
    """The struct `Shape` of fp4_tiles.cu, an argument of the kernel."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("M", "N", "K", "stride", "R", "rank", "width", "columns", "part_1", "part_2", "splits", "of_split",
                     "depth", "pieces", "few", "more", "stages")
    ]  # fmt: skip


@dataclass(frozen=True)
class DeviceProperties:
    """The number of a GPU's multiprocessors, and the shared memory in bytes that a thread block may use."""

    multiprocessors: int
    shared_bytes: int


@dataclass(frozen=True)
class LaunchConfig:
    """Parameters of a launch of the kernel.

    Attributes:
        rows: rows of x that the kernel variant takes, at least as many as the call has.
        tile: 64-row blocks of W in a tile.
        groups: warpgroups that multiply, per thread block.
        pieces: thread blocks that share a tile, each with a range of K.
        blocks: thread blocks of the launch.
        stages: stages that shared memory holds at once, each 128 columns of x and of a tile.
        width: columns that each part of x A^T takes in shared memory: the rank, rounded up.
        slabs: number of 64-column slabs for all parts of x A^T.
        splits: ranges of K over which x A^T is summed separately.
        of_split: columns in each of these ranges.
        shared_bytes: shared memory of a thread block.
    """

    rows: int
    tile: int
    groups: int
    pieces: int
    blocks: int
    stages: int
    width: int
    slabs: int
    splits: int
    of_split: int
    shared_bytes: int


def linear(
    x: Tensor, packed: Tensor, global_scale: Tensor, A: Tensor, B: Tensor, sizes: list[int], counters: Tensor,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute y = x W^T + bias + (x A^T) B^T, bfloat16 `[M, N]`, with one launch per `MAX_ROWS` rows.

    The thread blocks of a launch wait for each other. So no other stream, and no other process with a part of the GPU
    (`refusal`), may start such a launch at the same time.

    Args:
        x: bfloat16 `[M, K]`, rows aligned to 16 bytes, columns contiguous.
        packed: W `[N, K]`, packed by `formats.tiles.pack`. The kernel reads it before the previous launch ends, so that
            launch must not write it.
        global_scale: float32 `[1]`, as in a checkpoint. The previous launch must not write it either.
        A: bfloat16 `[P * r, K]`, the matrices of the layer's P parts (e.g. q, k, v) stacked, each with rank r.
        B: bfloat16 `[N, r]`, scaling included.
        sizes: number of columns of each part in y, N in total.
        counters: the layer's tensor from `barrier_counters`.
        bias: bfloat16 `[N]`.

    Raises ValueError for shapes that `supports` refuses.
    """
    (rows, columns), (N, rank) = x.shape, B.shape
    if not supports(sizes, columns, rank):
        raise ValueError(f"parts {sizes} x {columns}, rank {rank}; allowed: {SUPPORTED}")
    y = torch.empty(rows, N, dtype=torch.bfloat16, device=x.device)
    for rows_of_x, rows_of_y in zip(x.split(MAX_ROWS), y.split(MAX_ROWS), strict=True):
        if len(rows_of_x):  # split() of an empty x gives one empty part
            _multiply(rows_of_y, rows_of_x, packed, global_scale, A, B, sizes, counters, bias)
    return y


def _multiply(
    y: Tensor, x: Tensor, packed: Tensor, global_scale: Tensor, A: Tensor, B: Tensor, sizes: list[int],
    counters: Tensor, bias: Tensor | None,
) -> None:  # fmt: skip
    """Write y for at most `MAX_ROWS` rows of x with one launch; arguments as in `linear`."""
    (rows, columns), (N, rank) = x.shape, B.shape
    config = launch_config(rows, packed.shape, len(sizes), rank, device_properties(x.device))
    depth, t_columns = packed.shape[1], len(sizes) * config.width
    sums = torch.empty(config.splits * t_columns * config.rows, device=x.device)
    t = torch.empty(config.slabs * DEPTH * config.rows, dtype=torch.bfloat16, device=x.device)
    partial = torch.empty(
        config.blocks * config.tile * BLOCK * config.rows if config.pieces > 1 else 0, device=x.device
    )
    stride = x.stride(0) if rows > 1 else columns  # torch may report any stride for a single row
    shape = Shape(
        M=rows,
        N=N,
        K=columns,
        stride=stride,
        R=len(A),
        rank=rank,
        width=config.width,
        columns=t_columns,
        part_1=sum(sizes[:1]),  # N if the layer has one part
        part_2=sum(sizes[:2]),
        splits=config.splits,
        of_split=config.of_split,
        depth=depth,
        pieces=config.pieces,
        few=depth // config.pieces,
        more=depth % config.pieces,
        stages=config.stages,
    )
    _launch_kernel(config, x, B, [packed, global_scale, A, B, bias, y, sums, t, partial, counters], shape)


def supports(sizes: Sequence[int], columns: int, rank: int) -> bool:
    """Tell whether `linear` can multiply with this weight and LoRA rank.

    `sizes` has the rows of each part of the fused layer (q, k, v), `columns` is their common K.
    """
    whole = columns % DEPTH == 0 and all(size % BLOCK == 0 for size in sizes)
    return whole and len(sizes) <= 3 and fp4_tiles_takes_rank(rank)


def refusal() -> str:
    """Return why this GPU cannot run the kernel `fp4_tiles`; empty if it can."""
    if (capability := torch.cuda.get_device_capability()) != CAPABILITY:
        return f"needs a GPU of compute capability 9.0 (H100, H200), and this one has {capability}"
    if shared_by_mps():
        return (
            "cannot be where MPS shares the GPU: the blocks of a launch wait for each other, and launches of two "
            "processes, each with a part of the GPU, would wait for ever"
        )
    return ""


def shared_by_mps() -> bool:
    """Tell whether other processes may use part of this GPU at the same time, through NVIDIA's MPS."""
    from qerl_lab.rollout.vllm import nvrtc  # needs cuda.bindings

    return nvrtc.shared_by_mps(torch.cuda.current_device())


def barrier_counters(rows: int, device: torch.device) -> Tensor:
    """Allocate the counters of a layer with `rows` rows of W: int64 zeros by which thread blocks synchronize."""
    return torch.zeros(2 + rows // BLOCK, dtype=torch.int64, device=device)


def tile_of(N: int, columns: int, multiprocessors: int) -> int:
    """Choose the height of a tile of a weight [N, K = `columns`], in blocks of 64 rows: the fastest of `TILE_SIZES`.

    Estimates the time of the busiest multiprocessor as its stages, plus `_STAGES_OF_END`, times the height.
    """

    def stages_of_busiest(tile: int) -> int:
        tiles = ceil_div(N, tile * BLOCK)
        pieces = _blocks_per_tile(tiles, columns, multiprocessors)
        rounds = ceil_div(tiles * pieces, multiprocessors)
        return tile * (rounds * ceil_div(depth_of(columns), pieces) + _STAGES_OF_END)

    return min(TILE_SIZES, key=stages_of_busiest)


def groups_of(tile: int) -> int:
    """Return the number of warpgroups that share the multiplication of one tile.

    `tile` is the size of the tile in 64-row blocks, from 2 to 8: three warpgroups for 3 to 6 blocks, otherwise two.
    """
    return 2 if tile == 2 or tile > 6 else 3


def _blocks_per_tile(tiles: int, columns: int, multiprocessors: int) -> int:
    """Return how many thread blocks share a tile, if there are `tiles` tiles of `columns` columns.

    It is as many as fit on all multiprocessors at once, but at least one, and at most one per 128 columns.
    """
    return max(1, min(multiprocessors // tiles, depth_of(columns)))


def launch_config(
    rows: int, packed: Sequence[int], parts: int, rank: int, properties: DeviceProperties
) -> LaunchConfig:
    """Choose kernel variant and launch parameters for `rows` rows of x, with as many stages as fit in shared memory.

    `packed` is the shape of the packed weight, `parts` the number of fused parts (q, k, v: 3). Raises ValueError if
    shared memory is too small for two stages.
    """
    variant = next(most for most in VARIANTS if rows <= most)
    tiles, depth, _, tile, _ = packed
    groups, columns = groups_of(tile), depth * AT_A_TIME * DEPTH
    pieces = _blocks_per_tile(tiles, columns, properties.multiprocessors)
    blocks = min(tiles * pieces, properties.multiprocessors)
    width = ceil_div(rank, _RANKS) * _RANKS
    of_split = split_of(columns, ceil_div(rows, 16) * (parts * width // 16), _MAKERS * blocks)
    slabs = ceil_div(parts * width, DEPTH)
    stage = AT_A_TIME * (variant * DEPTH * 2 + tile * BLOCK_BYTES)
    rest = (2 * _MOST_STAGES + 2) * 8 + groups * _GROUP // 32 * _OUT_BYTES + variant * slabs * DEPTH * 2
    stages = min(_MOST_STAGES, (properties.shared_bytes - rest) // stage)
    if stages < 2:  # a stage is freed during the next one
        raise ValueError(f"two stages of {stage} bytes and {rest} more do not fit {properties.shared_bytes} bytes")
    return LaunchConfig(
        rows=variant, tile=tile, groups=groups, pieces=pieces, blocks=blocks, stages=stages, width=width,
        slabs=slabs, splits=ceil_div(columns, of_split), of_split=of_split, shared_bytes=stages * stage + rest,
    )  # fmt: skip


@cache
def split_of(columns: int, tiles: int, warps: int) -> int:
    """Choose how many columns of x each partial sum (split) of x A^T covers, for the fewest successive memory reads.

    `columns` is K, `tiles` the number of 16 x 16 tiles of x A^T, `warps` the number of warps that compute x A^T. A warp
    reads memory once per 64 columns of a tile, and once per 16 splits to add them up.
    """

    def successive_reads(of_split: int) -> int:  # columns of a split
        splits = ceil_div(columns, of_split)
        for_products = ceil_div(splits * tiles, warps) * of_split // _STEP_OF_SPLIT
        return for_products + ceil_div(splits, _SUMS_AT_ONCE)

    return min(range(_STEP_OF_SPLIT, columns + 1, _STEP_OF_SPLIT), key=successive_reads)


@cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Return the number of multiprocessors and the shared memory of the GPU `device`; cached."""
    from qerl_lab.rollout.vllm import nvrtc  # needs cuda.bindings

    number = torch.cuda.current_device() if device.index is None else device.index
    return DeviceProperties(torch.cuda.get_device_properties(number).multi_processor_count, nvrtc.shared_bytes(number))


def _launch_kernel(config: LaunchConfig, x: Tensor, B: Tensor, tensors: Sequence[Tensor | None], shape: Shape) -> None:
    """Launch the variant of the kernel in fp4_tiles.cu that `config` chooses, on x, B, `tensors` and `shape`."""
    from qerl_lab.rollout.vllm import nvrtc  # needs cuda.bindings

    name, line = instance(config.rows, config.tile, config.groups, config.pieces > 1)
    threads = config.groups * _GROUP + _OTHERS
    function = nvrtc.load_kernel(SOURCE, name, torch.cuda.current_device(), line, registers=65536 // threads // 8 * 8)
    maps = [nvrtc.tiles_map(x, shape.stride, config.rows, AT_A_TIME), nvrtc.rows_map(B, BLOCK, _RANKS)]
    nvrtc.launch(function, config.blocks, threads, config.shared_bytes, [*maps, x, *tensors, shape])


def instance(rows: int, tile: int, groups: int, shared: bool) -> tuple[str, str]:
    """Return the name of a kernel variant and the C++ line that instantiates it.

    `rows`, `tile` and `groups` are as in `LaunchConfig`; `shared` says whether several thread blocks share a tile.
    """
    of_variant = rows, tile, groups, int(shared)
    return "_".join(["fp4_tiles", *map(str, of_variant)]), f"FP4_TILES({', '.join(map(str, of_variant))})"
