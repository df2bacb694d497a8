"""The process that times Humming's schedules: `python -m qerl_lab.rollout.vllm.schedule_times TIMES.json`.

Started by `schedules.tuned`, which says on standard input what to time. For each shape and number of rows it climbs:
Humming's own schedule and a grid of tiles, then whatever differs from the fastest in one choice. Humming checks that a
schedule fits, and a schedule whose y is not that of Humming's own is left out.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from humming.kernel.humming import HummingKernel
from torch import Tensor, nn
from triton.testing import do_bench
from vllm.utils.humming import HummingMethod

from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.formats.format import Format
from qerl_lab.parent import end_with
from qerl_lab.rollout.vllm import fp4_linear
from qerl_lab.rollout.vllm.backend_times import COPIED_BYTES, KERNELS, call_each, followed, in_one, layer_of
from qerl_lab.rollout.vllm.backends import Shape
from qerl_lab.rollout.vllm.schedules import EARLY, OVERLAP, Interval, Schedule, first, near
from qerl_lab.timing import graphed, side_by_side

CLIMBS, FINALISTS = 2, 4
IN_ONE = "fp4_linear"
RANK = 32  # of the adapter that follows: it is timed too, and a schedule decides how early its kernels begin
STEADY = 50  # calls whose y must be right: blocks that race are not wrong each time
CLOSE = 0.01  # of the norm of y: sums in another order differ by 0.002
REFUSALS = (AssertionError, ValueError, TypeError, RuntimeError)  # what Humming says of a schedule that does not fit


def main(words: list[str]) -> None:
    """Time what is asked, and write for each place, a shape at a number of rows, what `fastest` gives."""
    asked = json.load(sys.stdin)
    end_with(asked["parent"])  # a run that is killed leaves nothing on the GPU
    torch.cuda.set_device(asked["device"])
    weight_format = formats.build(FormatConfig(**asked["format"]))
    places = [((tuple(sizes), columns), number) for (sizes, columns), number in asked["places"]]
    layers = {shape: Layers(weight_format, shape) for shape, _ in places}
    found = fastest([Search(layers[shape], number) for shape, number in places])
    Path(*words).write_text(json.dumps(found), encoding="utf-8")


class Layers:
    """Copies of one layer, more than any cache holds: in decoding every weight comes from memory."""

    def __init__(self, weight_format: Format, shape: Shape) -> None:
        self.sizes, self.columns = shape
        N, parts = sum(self.sizes), len(self.sizes)
        dense = torch.randn(N, self.columns, dtype=torch.bfloat16, device="cuda") / 50
        self.A, self.B = (
            torch.randn(size, dtype=torch.bfloat16, device="cuda") / 50
            for size in ((parts * RANK, self.columns), (N, RANK))
        )
        self.packed = weight_format.quantize(dense)
        count = math.ceil(COPIED_BYTES / sum(tensor.nbytes for tensor in self.packed.values()))
        self.each = [loaded(weight_format, self.packed, self.sizes) for _ in range(count)]
        self.in_one = weight_format.NAME == "nvfp4" and fp4_linear.runs_here(self.sizes, self.columns, RANK)
        self.own: list[Interval] = HummingMethod.get_default_tuning_configs(self.each[0])

    def takes(self, schedule: str) -> bool:
        """Whether the schedule fits the layer and this GPU. It is compiled where no one has yet."""
        layer: Any = self.each[0]
        about = layer.humming_metas[""].to_str(), layer.compute_config
        try:
            HummingKernel.prepare_kernels(*about, schedule, layer.weight.device)
        except REFUSALS:
            return False
        return True


def loaded(weight_format: Format, packed: Mapping[str, Tensor], sizes: Sequence[int]) -> nn.Module:
    """A layer with a copy of a packed weight, in Humming's layout."""
    layer = layer_of(packed, sizes)
    KERNELS[weight_format.NAME]["humming"]().process_weights_after_loading(layer)
    return layer


def call(layer: nn.Module, schedule: str, x: Tensor) -> Tensor:
    """x[M, K] W^T by a schedule, or by that of the rows where the text holds intervals."""
    y: Tensor = HummingMethod.forward_layer(layer, x, compute_config=layer.compute_config, tuning_config=schedule)
    return y


def written(schedule: Schedule) -> str:
    """A schedule as Humming reads it, the same text for the same one."""
    return json.dumps(schedule, sort_keys=True)


class Search:
    """The schedules of one layer at one number of rows, and their microseconds."""

    def __init__(self, layers: Layers, rows: int) -> None:
        self.layers, self.rows = layers, rows
        self.x = torch.randn(rows, layers.columns, dtype=torch.bfloat16, device="cuda")
        self.own = next(written(schedule) for low, high, schedule in layers.own if low < rows <= high)
        self.us: dict[str, float] = {}

    @cached_property
    def y(self) -> Tensor:
        """That of Humming's own schedule. When it is asked for first, that is compiled, with others beside it."""
        return call(self.layers.each[0], self.own, self.x)

    def fresh(self, climb: int) -> list[str]:
        """What is to be timed next, as text."""
        own = json.loads(self.own)
        changed = [own, own | EARLY, own | EARLY | OVERLAP]
        grid = [*changed, *first(self.rows)] if climb == 0 else near(json.loads(self.best))
        return [text for schedule in grid if (text := written(schedule)) not in self.us]

    @property
    def best(self) -> str:
        return min(self.us, key=lambda text: self.us[text])

    def is_right(self, schedule: str, calls: int) -> bool:
        """Whether the launch succeeds, which it does not for want of shared memory say, and each y is Humming's own."""
        try:
            ys = [call(layer, schedule, self.x) for layer in islice(cycle(self.layers.each), calls)]
        except RuntimeError:
            return False
        return all((y - self.y).float().norm() <= CLOSE * self.y.float().norm() for y in ys)

    def measure(self, schedule: str) -> float:
        """Microseconds of a call and its adapter; infinite where y is wrong."""
        if not self.is_right(schedule, 1):
            return math.inf
        return 1e3 * do_bench(self.work(schedule), warmup=2, rep=6, return_mode="median") / len(self.layers.each)

    def work(self, schedule: str) -> Callable[[], object]:
        own = self.layers
        calls = [followed(partial(call, layer, schedule), own.A, own.B, own.sizes) for layer in own.each]
        return graphed(partial(call_each, calls, self.x))

    def work_in_one(self) -> Callable[[], object]:
        own = self.layers
        return graphed(partial(call_each, [in_one(own.packed, own.A, own.B, own.sizes) for _ in own.each], self.x))

    def final(self) -> dict[str, Any]:
        """Measure the leaders in turns with Humming's own, and with `fp4_linear` where that takes layer and rows.

        Returns: `schedule`, the fastest; `us`, the microseconds of Humming's own and of the fastest; `in_one`, those
        of `fp4_linear`, or None; `own`, all schedules that Humming has for the layer.
        """
        leaders = sorted(self.us, key=lambda text: self.us[text])[:FINALISTS]
        steady = [text for text in leaders if self.us[text] < math.inf and self.is_right(text, STEADY)]
        works = {text: self.work(text) for text in {self.own, *steady}}
        if self.layers.in_one and self.rows <= fp4_linear.MAX_ROWS:
            works[IN_ONE] = self.work_in_one()
        us = {text: 1e3 * ms / len(self.layers.each) for text, ms in side_by_side(works, milliseconds=10).items()}
        found = {"in_one": us.pop(IN_ONE, None), "own": self.layers.own}
        best = min(us, key=lambda text: us[text])
        return {**found, "schedule": json.loads(best), "us": (us[self.own], us[best])}


def fastest(searches: Sequence[Search]) -> list[dict[str, Any]]:
    """Climb in all searches at once, so that every core has something to compile."""
    for climb in range(1 + CLIMBS):
        fresh = [(search, text) for search in searches for text in search.fresh(climb)]
        taken = compiled((search.layers, text) for search, text in fresh)
        for search, text in fresh:
            search.us[text] = search.measure(text) if taken[search.layers, text] else math.inf
    return [search.final() for search in searches]


def compiled(wanted: Iterable[tuple[Layers, str]]) -> dict[tuple[Layers, str], bool]:
    """Compile side by side, in Humming's own processes, and tell which schedules their layers take."""
    each = list(dict.fromkeys(wanted))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(each, pool.map(lambda one: one[0].takes(one[1]), each), strict=True))


if __name__ == "__main__":
    main(sys.argv[1:])
