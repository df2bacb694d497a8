"""Share the memory of a GPU between jobs: each takes at most its part (`jobs_per_gpu`)."""

import os

import torch

from qerl_lab.config.units import GIB

OUTSIDE_TORCH = GIB  # of a job: CUDA's context and libraries, which torch does not count


def part_bytes(device: torch.device, jobs: int) -> int:
    """Return how many bytes of the GPU `device` torch may take in one of `jobs` jobs that share it."""
    _, total = torch.cuda.mem_get_info(device)
    return total if jobs == 1 else max(0, total // jobs - OUTSIDE_TORCH)


def limit_to_part(device: torch.device, jobs: int) -> None:
    """Limit torch to `part_bytes` of the GPU `device` if `jobs` jobs share it; do nothing for one job or on a CPU.

    Without a limit torch keeps the memory that it freed, until the other jobs find none. At the limit it reuses that
    memory first, and raises OutOfMemoryError only for a job that needs more than its part.
    """
    if device.type == "cuda" and jobs > 1:
        _, total = torch.cuda.mem_get_info(device)
        index = torch.cuda.current_device() if device.index is None else device.index  # torch refuses `cuda` alone here
        torch.cuda.set_per_process_memory_fraction(part_bytes(device, jobs) / total, index)


def is_shared(device: torch.device) -> bool:
    """Tell whether other processes seem to use the GPU `device`: over 1 GiB is taken outside of torch. CPU: False."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device) > OUTSIDE_TORCH


def free_bytes(device: torch.device, jobs: int) -> int:
    """Return the memory of `device` in bytes that is free for this job.

    If `jobs` jobs share a GPU, the result is at most what is left of one job's part (`part_bytes`). On a GPU torch
    first gives its unused cached memory back.
    """
    if device.type != "cuda":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.cuda.empty_cache()  # torch's cached memory would count as used
    free, _ = torch.cuda.mem_get_info(device)
    return free if jobs == 1 else min(free, part_bytes(device, jobs) - torch.cuda.memory_reserved(device))
