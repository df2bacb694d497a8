"""Find the GPUs of this machine and their memory. Imports no torch."""

import os
from functools import cache
from pathlib import Path

from qerl_lab.system.processes import output_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")  # NVIDIA, WSL, ROCm, Jetson


def has_gpu() -> bool:
    """Tell whether the system shows a GPU to this process. The installed torch may still lack GPU support."""
    hidden = os.environ.get(VISIBLE)
    return hidden not in ("", "-1") and any(Path(node).exists() for node in GPU_NODES)


@cache
def visible_gpus() -> list[str] | None:
    """List the GPUs that this process may use, named as in CUDA_VISIBLE_DEVICES; None if unknown."""
    if given := os.environ.get(VISIBLE):
        return given.split(",")
    count = sum(line.startswith("GPU ") for line in (output_of("nvidia-smi", "-L") or "").splitlines())
    return [str(index) for index in range(count)] or None


@cache
def gpu_memory_bytes() -> int | None:
    """Return the memory in bytes of the NVIDIA GPU with most memory; None if unknown."""
    lines = output_of("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits") or ""
    return max((int(line) for line in lines.splitlines() if line.isdigit()), default=0) * 2**20 or None
