"""How Humming cuts the products of 4-bit weights: the fastest schedules here, timed once. Imports no vLLM.

A schedule is one of Humming's tuning configurations: tiles, stages, blocks a multiprocessor, how K is shared out. Its
own choice goes by the GPU and the format alone, so that small and large layers get one schedule. Here each shape
of a layer has its own, for each doubling of the rows (`schedule_times` measures them in a process of its own).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.rollout.vllm import fp4_linear, fp4_tiles
from qerl_lab.rollout.vllm.backends import Shape, measured, remembered, shapes_of

Schedule = dict[str, Any]
Interval = tuple[int, int, Schedule]  # for more rows than the first number, up to the second

TIMER = "qerl_lab.rollout.vllm.schedule_times"
PLACE = "between a norm and an adapter"  # part of what times are kept by: others are no times of the same
LONGEST = 1800  # seconds
FEWEST_ROWS, MOST_ROWS = 8, 512
# Columns of a tile and of a warp, of K likewise: what a warpgroup multiplies, and what the mma of fewer rows does.
_WGMMA_TILES = [((128, 32), (64, 64)), ((128, 32), (128, 64)), ((256, 64), (64, 64)), ((256, 64), (128, 64)),
                ((256, 32), (64, 64)), ((128, 32), (256, 64)), ((256, 32), (128, 64))]  # fmt: skip
_MMA_TILES = [((128, 64), (128, 32)), ((128, 32), (128, 64)), ((64, 32), (256, 64)), ((128, 64), (256, 64))]
_MMA_ROWS = 32
EARLY = {"use_pdl": True}  # a launch begins before the kernel ahead of it has ended
OVERLAP = {"wgmma_split_issue_wait": True}  # a product is issued, and waited for when the next words are unpacked
# What Humming takes for a choice that a schedule leaves out.
DEFAULTS: Schedule = {
    "mma_type": "wgmma", "num_stages": 2, "num_ctas_per_sm": 1, "use_warp_spec": False, "use_stream_k": True,
    "evict_weights_first": False, "smem_reuse_mode": None, "multi_cast_size_a": 1, "use_pdl": False,
    "wgmma_split_issue_wait": False,
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The schedules of layers by `name_of` their shape, and the names of those whose few rows need no `fp4_linear`."""

    schedules: dict[str, list[Interval]] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)  # product and adapter, one after the other, are faster there


def tuned(cfg: RunConfig, model: nn.Module) -> Tuned:
    """Return what is fastest for the layers of `model`; nothing unless linear_backend=tuned.

    Nothing either where `dense_rows` takes all rows. Raises ConfigError where it cannot be timed.
    """
    rows = doubling_rows(cfg)
    if cfg.rollout.vllm.linear_backend != "tuned" or not rows:
        return Tuned()
    return tuned_for(cfg.format, list(shapes_of(model)), rows)


def tuned_for(weight_format: FormatConfig, shapes: Sequence[Shape], rows: Sequence[int]) -> Tuned:
    """What is fastest for layers of these shapes, timed at these numbers of rows where it is not known yet.

    Times are kept beside unpacked GGUF files, by GPU, version of Humming, format, shape and rows. Raises ConfigError
    where schedules cannot be timed.
    """
    about = [torch.cuda.get_device_name(), version("humming-kernels"), weight_format.name, PLACE]
    keys = {(shape, number): json.dumps([*about, *shape, number]) for shape in shapes for number in rows}
    with remembered("humming_schedules.json") as known:
        if missing := [place for place, key in keys.items() if key not in known]:
            print(f"linear_backend=tuned: timing schedules of {len(shapes)} layers at {list(rows)} rows: minutes, once")
            asked = {"format": asdict(weight_format), "places": missing}
            for place, found in zip(missing, measured("tuned", TIMER, asked, LONGEST), strict=True):
                known[keys[place]] = found
    timed = {shape: [known[keys[shape, number]] for number in rows] for shape in shapes}
    for shape, each in timed.items():
        print(f"linear_backend=tuned: {name_of(shape)}, {in_words(rows, each)}")
    return Tuned(
        {
            name_of(shape): intervals([(number, one["schedule"]) for number, one in zip(rows, each, strict=True)],
                                      each[-1]["own"])
            for shape, each in timed.items()
        },
        [name_of(shape) for shape, (fewest, *_) in timed.items() if is_apart(fewest)],
    )  # fmt: skip


def in_words(rows: Sequence[int], timed: Sequence[Mapping[str, Any]]) -> str:
    """What was timed of one layer, at each number of rows."""
    pairs, in_one = [one["us"] for one in timed], timed[0]["in_one"]
    us = ", ".join(f"{number}: {own:.1f} {best:.1f}" for number, (own, best) in zip(rows, pairs, strict=True))
    beside = "" if in_one is None else f"; {rows[0]} by fp4_linear: {in_one:.1f}"
    return f"rows: microseconds with an adapter by Humming's own choice, fastest: {us}{beside}"


def is_apart(found: Mapping[str, Any]) -> bool:
    """Whether the fastest schedule and the adapter's kernels took less than `fp4_linear`, by the fewest rows."""
    return found["in_one"] is not None and found["us"][1] < found["in_one"]


def doubling_rows(cfg: RunConfig) -> list[int]:
    """Rows of decoding, doubling up to a full batch; without those that `dense_rows` or `fp4_tiles` takes."""
    own, full = cfg.rollout.vllm, min(cfg.rollout.batch_size, cfg.completions_per_gpu, MOST_ROWS)
    rows = {full} | {FEWEST_ROWS << power for power in range(16) if FEWEST_ROWS << power < full}
    if own.fp4_tiles:
        few = fp4_linear.MAX_ROWS if own.fp4_linear else 0  # timed against that kernel
        rows = {number for number in rows if number <= few or number > fp4_tiles.MAX_ROWS}
    return sorted(number for number in rows if not own.dense_rows or number < own.dense_rows)


def name_of(shape: Shape) -> str:
    """A layer's shape as the engine knows it, N x K."""
    sizes, columns = shape
    return f"{sum(sizes)}x{columns}"


def first(rows: int) -> Iterator[Schedule]:
    """Schedules to begin with: every tile, one to three blocks a multiprocessor. Some may not fit a layer or a GPU."""
    whole = -(-rows // 8) * 8
    for block_m in {min(whole, most) for most in (64, 128)}:
        for tile in _WGMMA_TILES:
            for blocks in (1, 2, 3):
                yield wgmma(block_m, *tile, blocks)
    if rows <= _MMA_ROWS:
        block_m = 8 if rows <= 8 else -(-rows // 16) * 16
        for tile in _MMA_TILES:
            for blocks in (1, 2, 4):
                yield mma(block_m, *tile, blocks)


def wgmma(block_m: int, n: tuple[int, int], k: tuple[int, int], blocks: int) -> Schedule:
    """A block of warps that load and warpgroups that multiply."""
    return {
        "mma_type": "wgmma", "block_shape": [block_m, n[0], k[0]], "warp_shape": [block_m, n[1], k[1]],
        "num_stages": 4, "num_ctas_per_sm": blocks, "use_stream_k": True, "use_warp_spec": True, "use_tma": True,
        **EARLY, **OVERLAP,
    }  # fmt: skip


def mma(block_m: int, n: tuple[int, int], k: tuple[int, int], blocks: int) -> Schedule:
    """A block whose warps load and multiply."""
    of_warps = {"mma_type": "mma", "use_warp_spec": False, "use_tma": False}
    return wgmma(block_m, n, k, blocks) | of_warps | dict.fromkeys(OVERLAP, False)


def near(schedule: Schedule) -> Iterator[Schedule]:
    """The schedules that differ from one in a single choice."""
    at = DEFAULTS | schedule
    stages, blocks = at["num_stages"], at["num_ctas_per_sm"]
    choices: dict[str, set[Any]] = {
        "num_stages": {stages - 1, stages + 1, stages + 2, 2 * stages} - {0},
        "num_ctas_per_sm": {blocks - 1, blocks + 1} - {0},
        "smem_reuse_mode": {"none"},
        "multi_cast_size_a": {1, 2} if at["use_warp_spec"] else set(),
    }
    for key, values in choices.items():
        yield from (schedule | {key: value} for value in sorted(values - {at[key]}))
    for key in ("use_stream_k", "evict_weights_first", *EARLY, *(OVERLAP if at["mma_type"] == "wgmma" else ())):
        yield schedule | {key: not at[key]}


def intervals(best: Sequence[tuple[int, Schedule]], own: Sequence[Interval]) -> list[Interval]:
    """Let each of `best`, by rows, serve the rows down to the one before, and Humming's `own` schedules the rest."""
    found, last = [], 0
    for rows, schedule in best:
        found.append((last, rows, schedule))
        last = rows
    return found + [(max(low, last), high, schedule) for low, high, schedule in own if high > last]
