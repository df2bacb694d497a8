"""Read clock speed, power, temperature and memory of the GPU. Every value is None without a GPU."""

import shutil
import statistics
import subprocess
from types import TracebackType
from typing import Self

import torch

from qerl_lab.config.units import GIB

_READ = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu"
_EVERY = "250"  # milliseconds


class Clocks:
    """Sample nvidia-smi while a block runs. `row` has clock, watts and temperature; None without nvidia-smi."""

    def __init__(self) -> None:
        self.row: dict[str, float | None] = dict.fromkeys(("sm_mhz", "sm_mhz_least", "sm_mhz_max", "watts", "celsius"))
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if torch.cuda.is_available() and (program := shutil.which("nvidia-smi")):
            this = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
            command = [program, "-i", this, f"--query-gpu={_READ}", "--format=csv,noheader,nounits", "-lms", _EVERY]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self.row |= parse_medians(self._process.communicate()[0])


def parse_medians(lines: str) -> dict[str, float | None]:
    """Return medians of nvidia-smi's output, skipping incomplete lines and [N/A]."""
    rows: list[list[float]] = []
    for line in lines.splitlines():
        try:
            values = [float(value) for value in line.split(",")]
        except ValueError:
            continue
        if len(values) == len(_READ.split(",")):
            rows.append(values)
    if not rows:
        return {}
    now, top, watts, celsius = ([row[column] for row in rows] for column in range(4))
    return {
        "sm_mhz": statistics.median(now), "sm_mhz_least": min(now), "sm_mhz_max": max(top),
        "watts": statistics.median(watts), "celsius": max(celsius),
    }  # fmt: skip


def wait() -> None:
    """Wait until the GPU has finished all queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def used_gib() -> float | None:
    """Return the GiB of GPU memory in use by all processes, including CUDA's own."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def peak_gib() -> float | None:
    """Return the peak GiB of torch's tensors in this process."""
    return torch.cuda.max_memory_allocated() / GIB if torch.cuda.is_available() else None
