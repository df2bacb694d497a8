"""Find this machine's memory, its GPUs and their memory. Imports no torch.

The memory is found on Linux only.
"""

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from qerl_lab.system.processes import output_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")  # NVIDIA, WSL, ROCm, Jetson
INFO, OWN_GROUPS, MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LIMIT = "memory.max"  # file with the limit of a control group


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


def memory_bytes() -> int | None:
    """Return the size in bytes of this machine's memory and swap together; None if unknown.

    If a control group (version 2) of this process, such as its container's or job's, has a lower limit, returns the
    lowest limit.
    """
    text = INFO.read_text() if INFO.is_file() else ""
    known = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemTotal" not in known:
        return None
    return min([known["MemTotal"] + known.get("SwapTotal", 0), *_memory_limits()])


def _memory_limits() -> Iterator[int]:
    """Yield the limit in bytes of each control group of this process that limits memory, and of each above it."""
    match = re.search(r"^0::/(.*)$", OWN_GROUPS.read_text() if OWN_GROUPS.is_file() else "", re.MULTILINE)
    if match is not None:
        group = Path(match[1])
        # Up to the root, because a container may have its group mounted there although the path is the host's.
        for name in (group, *group.parents):
            limit = MOUNT / name / LIMIT
            if ".." in name.parts or not limit.is_file():
                continue
            size = limit.read_text().strip()
            if size.isdigit():  # not "max"
                yield int(size)
