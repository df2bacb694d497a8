"""Time work on a GPU, and read its clock speed, power, temperature and memory."""

import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from qerl_lab.config.units import GIB

Work = Callable[[], object]
ROUNDS = 3
READ = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu"


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


@contextmanager
def clocks() -> Iterator[dict[str, float | None]]:
    """Sample nvidia-smi while a block runs. The row gets clock, watts and temperature at its end, else stays None."""
    row: dict[str, float | None] = dict.fromkeys(("sm_mhz", "sm_mhz_least", "sm_mhz_max", "watts", "celsius"))
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        yield row
        return
    this = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = [program, "-i", this, f"--query-gpu={READ}", "--format=csv,noheader,nounits", "-lms", "250"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield row
    finally:
        process.terminate()
        row |= parse_clocks(process.communicate()[0])


def parse_clocks(lines: str) -> dict[str, float | None]:
    """Return medians and extremes of nvidia-smi's output, skipping incomplete lines and [N/A]."""
    rows: list[list[float]] = []
    for line in lines.splitlines():
        with suppress(ValueError):
            rows.append([float(value) for value in line.split(",")])
    whole = [row for row in rows if len(row) == len(READ.split(","))]
    if not whole:
        return {}
    now, top, watts, celsius = zip(*whole, strict=True)
    return {
        "sm_mhz": statistics.median(now), "sm_mhz_least": min(now), "sm_mhz_max": max(top),
        "watts": statistics.median(watts), "celsius": max(celsius),
    }  # fmt: skip


def wait() -> None:
    """Wait until the GPU has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_at_end() -> dict[str, float | None]:
    """Return the peak GiB of torch's tensors in this process, and the GiB that all processes hold; None without a GPU.

    The second includes CUDA's own.
    """
    if not torch.cuda.is_available():
        return {"peak_gib": None, "used_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "used_gib": (total - free) / GIB}
