"""Find this machine's memory, and the limits that control groups (cgroup v1 and v2) of containers and jobs set on it.

Linux only: elsewhere the memory is unknown.
"""

import re
from collections.abc import Iterator
from pathlib import Path

INFO, OWN_GROUPS, MOUNT = Path("/proc/meminfo"), Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
# Files with the limit and the usage of a control group; the entry of memory.stat for page cache that can be dropped.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def size_bytes() -> int | None:
    """Return the size in bytes of this machine's memory and swap together; None if unknown.

    If a control group of this process has a lower limit, returns the lowest limit.
    """
    known = _meminfo()
    if "MemTotal" not in known:
        return None
    return min([known["MemTotal"] + known.get("SwapTotal", 0), *(limit for limit, _ in _limits())])


def available_bytes() -> int | None:
    """Return the bytes of memory that a process can allocate without swapping; None if unknown.

    The page cache counts as free. A control group of this process may leave less than the machine has.
    """
    known = _meminfo()
    if "MemAvailable" not in known:
        return None
    return max(0, min([known["MemAvailable"], *(limit - used for limit, used in _limits())]))


def _meminfo() -> dict[str, int]:
    """Return the entries of /proc/meminfo in bytes, by name; empty if the file is missing."""
    text = INFO.read_text() if INFO.is_file() else ""
    return {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB", text, re.MULTILINE)}


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes for each control group of this process that limits memory, and each above it.

    `used` leaves out page cache that the kernel drops when memory is short.
    """
    for line in OWN_GROUPS.read_text().splitlines() if OWN_GROUPS.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        (of_limit, of_usage, entry), root = (V1, MOUNT / "memory") if controllers else (V2, MOUNT)
        groups = Path(path.lstrip("/"))
        # A container may see its own group alone, mounted as the root, under the path that the host knows.
        for folder in {root, *(root / one for one in (groups, *groups.parents) if ".." not in one.parts)}:
            limit = (folder / of_limit).read_text().strip() if (folder / of_limit).is_file() else "max"
            if not limit.isdigit():
                continue
            usage, stat = folder / of_usage, folder / "memory.stat"
            used = int(usage.read_text()) if usage.is_file() else 0
            cache = re.search(rf"^{entry} (\d+)$", stat.read_text() if stat.is_file() else "", re.MULTILINE)
            yield int(limit), used - (int(cache[1]) if cache else 0)
