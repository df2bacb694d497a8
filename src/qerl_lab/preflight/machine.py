"""Find the GPUs and the memory of this machine. Imports no torch."""

import os
import re
import subprocess
from functools import cache
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")  # NVIDIA, WSL, ROCm, Jetson


def has_gpu() -> bool:
    """Tell whether the system shows a GPU to this process; torch may still be a build without GPU support."""
    hidden = os.environ.get(VISIBLE)
    return hidden not in ("", "-1") and any(Path(node).exists() for node in GPU_NODES)


def _ask_nvidia_smi(*arguments: str) -> list[str]:
    """Return the lines that nvidia-smi prints; none if it is missing, fails or takes more than 30 seconds."""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


@cache
def visible_gpus() -> list[str] | None:
    """List the names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES; None if unknown."""
    if given := os.environ.get(VISIBLE):
        return given.split(",")
    count = sum(line.startswith("GPU ") for line in _ask_nvidia_smi("-L"))
    return [str(index) for index in range(count)] or None


def memory_bytes() -> int | None:
    """Return the size of this machine's memory and swap, or its control group's limit if lower; None if unknown."""
    info = Path("/proc/meminfo")
    if not info.is_file():
        return None
    found = dict(re.findall(r"^(MemTotal|SwapTotal):\s+(\d+) kB", info.read_text(), re.MULTILINE))
    total, limit = sum(map(int, found.values())) * 1024, Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


@cache
def gpu_memory_bytes() -> int | None:
    """Return the memory of the largest NVIDIA GPU; None if unknown."""
    lines = _ask_nvidia_smi("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    return max((int(line) for line in lines if line.isdigit()), default=0) * 2**20 or None
