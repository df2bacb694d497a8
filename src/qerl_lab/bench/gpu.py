"""Read clock speed and memory of the GPU."""

import shutil
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from qerl_lab.config.units import GIB


@contextmanager
def clocks() -> Iterator[dict[str, float | None]]:
    """Context manager: measure the GPU's clock during a `with` block.

    Yields a dict with the key `sm_mhz`, which is None during the block. After the block it is the median in MHz of what
    nvidia-smi printed. It stays None without nvidia-smi or a GPU.
    """
    row: dict[str, float | None] = {"sm_mhz": None}
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        yield row
        return
    this = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    command = [program, "-i", this, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", "-lms", "250"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield row
    finally:
        process.terminate()
        row["sm_mhz"] = median_clock(process.communicate()[0])


def median_clock(printed: str) -> float | None:
    """Return the median clock in MHz of `printed`, the output of nvidia-smi with a number per line; None without one.

    Skips lines with [N/A], and the last line if nvidia-smi was stopped while it wrote it.
    """
    whole, _, _ = printed.rpartition("\n")
    read = [int(line) for line in whole.splitlines() if line.isdecimal()]
    return statistics.median(read) if read else None


def wait_for_gpu() -> None:
    """Wait until the GPU has finished all queued work, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def memory_at_end() -> dict[str, float | None]:
    """Return the GPU memory in use, in GiB: `peak_gib` and `used_gib`, both None without a GPU.

    `peak_gib` is the peak of torch's tensors in this process, `used_gib` is what all programs use now.
    """
    if not torch.cuda.is_available():
        return {"peak_gib": None, "used_gib": None}
    free, total = torch.cuda.mem_get_info()
    return {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "used_gib": (total - free) / GIB}


def base_gib(model: nn.Module) -> float:
    """Return the GiB of a model's frozen base: weights, buffers, and the scales of weights that bitsandbytes packed."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    states = [state for parameter in frozen if (state := getattr(parameter, "quant_state", None)) is not None]
    scales = [tensor for state in states for tensor in state.as_dict(packed=True).values()]
    return sum(tensor.nbytes for tensor in (*frozen, *model.buffers(), *scales)) / GIB
