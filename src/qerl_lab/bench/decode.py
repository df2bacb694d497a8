"""Time the Linears of one decoder layer with the few rows of decoding, by kernel, with and without an adapter.

Each time is the mean of many calls in a CUDA graph. They use copies of the weights larger than the cache, since
decoding reads every weight from memory. Before each call a small kernel writes x, as a norm would; its time is
subtracted.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qerl_lab import formats
from qerl_lab.bench import kernel_calls
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu_timing import graphed, side_by_side
from qerl_lab.bench.shapes import fused_linears
from qerl_lab.config.schema import FormatConfig
from qerl_lab.report.bench import AND_ADAPTER
from qerl_lab.rollout.vllm import adapter_kernels, fp4_tiles
from qerl_lab.rollout.vllm.backends import FP4_TILES
from qerl_lab.rollout.vllm.product import add_products

CACHE_BYTES = 2 * 60 * 2**20  # twice the L2 cache of an H200
MOST_COPIES = 48
MOST_ROWS = 1024
NOTHING = "nothing"  # the small kernel before each call, timed alone

Call = Callable[[Tensor], Any]


@dataclass(frozen=True)
class TimedArm:
    """An arm. `call()` returns a product on fresh copies of its weights, which take `size` bytes."""

    call: Callable[[], Call]
    size: int

    def calls(self) -> list[Call]:
        return [self.call() for _ in range(min(MOST_COPIES, math.ceil(CACHE_BYTES / self.size)))]


def times(model: str, rows: list[int], rank: int) -> Iterator[Row]:
    """Yield microseconds per call and terabytes of weights read per second, for each Linear, row count and arm.

    `adapter_*` time the adapter alone, `*_and_adapter` a kernel followed by the adapter as engines run them, and
    `fp4_tiles` both in one kernel, if it supports the model.
    """
    linears = fused_linears(model)
    taken = not fp4_tiles.refusal() and all(fp4_tiles.supports(*linear, rank) for linear in linears.values())
    for layer, (sizes, columns) in linears.items():
        every = arms(sizes, columns, rank)
        if not taken:
            del every[FP4_TILES]  # a sum over some of the Linears would look like the whole layer's
        calls = {name: arm.calls() for name, arm in every.items()}
        for number in rows:
            x = torch.randn(number, columns, dtype=torch.bfloat16, device="cuda")
            graphs = {name: graphed(partial(kernel_calls.call_each, calls[name], x)) for name in every}
            graphs[NOTHING] = graphed(partial(kernel_calls.call_each, [lambda x: None] * MOST_COPIES, x))
            taken_ms = side_by_side(graphs, milliseconds=20)
            before = taken_ms.pop(NOTHING) / MOST_COPIES
            for name, ms in taken_ms.items():
                seconds = (ms / len(calls[name]) - before) / 1e3
                yield {
                    "model": model, "layer": layer, "N": sum(sizes), "K": columns, "rows": number, "rank": rank,
                    "arm": name, "us": 1e6 * seconds, "tb_per_s": every[name].size / seconds / 1e12,
                }  # fmt: skip


def arms(sizes: list[int], columns: int, rank: int) -> dict[str, TimedArm]:
    """Build all arms: BF16, each NVFP4 kernel, each with the adapter, adapter alone by each route, fp4_tiles."""
    dense = torch.randn(sum(sizes), columns, dtype=torch.bfloat16, device="cuda") / 50
    packed = formats.build(FormatConfig(name="nvfp4")).quantize(dense)
    A, B = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 50 for shape in
            ((len(sizes) * rank, columns), (sum(sizes), rank)))  # fmt: skip
    size, of_adapter = sum(tensor.nbytes for tensor in packed.values()), A.nbytes + B.nbytes
    found = {"bf16": TimedArm(lambda: partial(functional.linear, weight=dense.clone()), dense.nbytes)}
    found |= {
        name: TimedArm(partial(kernel_calls.kernel_call, name, packed, sizes), size) for name in kernel_calls.KERNELS
    }
    found |= {
        f"{name}{AND_ADAPTER}": TimedArm(partial(kernel_and_adapter_call, arm.call, A, B, sizes), arm.size + of_adapter)
        for name, arm in found.items()
    }
    found |= {
        f"adapter_{name}": TimedArm(partial(adapter_call, route, A, B, sizes), of_adapter)
        for name, route in ROUTES.items()
    }
    in_tiles = partial(kernel_calls.tiles_call, packed, A, B, sizes)
    return found | {FP4_TILES: TimedArm(in_tiles, size + of_adapter)}


# Functions (y, x, A, B, sizes) that add the adapter's product to y in place, by route of `rollout.vllm.product`.
ROUTES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, list[int]], None]] = {
    "kernels": lambda y, x, A, B, sizes: adapter_kernels.expand(y, adapter_kernels.shrink(x, A), B, sizes),
    "mixed": lambda y, x, A, B, sizes: adapter_kernels.expand(y, (x @ A.t())[None], B, sizes),
    "cublas": add_products,
}


def adapter_call(route: Callable[..., None], A: Tensor, B: Tensor, sizes: list[int]) -> Call:
    """Return a call that adds the adapter's product by one route, on copies of the adapter."""
    A, B, y = A.clone(), B.clone(), torch.zeros(MOST_ROWS, len(B), dtype=A.dtype, device=A.device)
    return lambda x: route(y[: len(x)], x, A, B, sizes)


def kernel_and_adapter_call(product: Callable[[], Call], A: Tensor, B: Tensor, sizes: list[int]) -> Call:
    """Return a call that runs a kernel and then the adapter, on copies of both."""
    return kernel_calls.with_adapter(product(), A.clone(), B.clone(), sizes)
