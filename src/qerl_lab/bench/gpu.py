"""Read clock speed, power, temperature and memory of the GPU."""

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from qerl_lab.config.units import GIB

READ = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu"


@contextmanager
def clocks() -> Iterator[dict[str, float | None]]:
    """Context manager: sample clock, power and temperature with nvidia-smi; its dict is filled at the end.

    Values stay None without nvidia-smi or a GPU.
    """
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
    """Parse nvidia-smi's output to medians and extremes, skipping incomplete lines and [N/A]."""
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


def wait_for_gpu() -> None:
    """Wait until the GPU has finished all queued work, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_at_end() -> dict[str, float | None]:
    """Return the peak GiB of torch's tensors in this process, and the GiB in use on the GPU, by all programs.

    Both are None without a GPU.
    """
    if not torch.cuda.is_available():
        return {"peak_gib": None, "used_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "used_gib": (total - free) / GIB}
