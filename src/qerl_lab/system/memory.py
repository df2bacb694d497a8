"""Find this machine's memory, and the limits that control groups (version 2) of containers and jobs set on it.

Linux only: elsewhere the memory is unknown.
"""

import re
from collections.abc import Iterator
from pathlib import Path

INFO, OWN_GROUPS, MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
LIMIT = "memory.max"  # file with the limit of a control group


def size_bytes() -> int | None:
    """Return the size in bytes of this machine's memory and swap together; None if unknown.

    If a control group of this process has a lower limit, returns the lowest limit.
    """
    text = INFO.read_text() if INFO.is_file() else ""
    known = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}
    if "MemTotal" not in known:
        return None
    return min([known["MemTotal"] + known.get("SwapTotal", 0), *_limits()])


def _limits() -> Iterator[int]:
    """Yield the limit in bytes of each control group of this process that limits memory, and of each above it."""
    own = re.search(r"^0::/(.*)$", OWN_GROUPS.read_text() if OWN_GROUPS.is_file() else "", re.MULTILINE)
    if own is not None:
        group = Path(own[1])
        # The parents end with the root. A container may see its own group alone, as the root, under the host's path.
        for name in (group, *group.parents):
            limit = MOUNT / name / LIMIT
            if ".." not in name.parts and limit.is_file() and (size := limit.read_text().strip()).isdigit():
                yield int(size)  # not "max"
