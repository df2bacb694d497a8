"""Clocks for work on a GPU."""

import statistics
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]
ROUNDS = 3


def side_by_side(arms: Mapping[str, Work], milliseconds: int = 60) -> dict[str, float]:
    """Measure the median milliseconds of each arm; they take turns, so that a clock that drifts meets all of them.

    Timed by events on the GPU, the second-level cache flushed before every call (`triton.testing.do_bench`).
    """
    from triton.testing import do_bench

    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, work in arms.items():
            times[name].append(do_bench(work, warmup=15, rep=milliseconds, return_mode="median"))
    return {name: statistics.median(rounds) for name, rounds in times.items()}


def graphed(work: Work) -> Work:
    """Record `work` as a CUDA graph: its kernels without the time that Python takes to launch them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay
