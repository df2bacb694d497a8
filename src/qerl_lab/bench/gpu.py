"""Read clock speed, power, temperature and memory of the GPU."""

import io
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import nn

from qerl_lab.config.units import GIB

READ = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu"


@contextmanager
def clocks() -> Iterator[dict[str, float | None]]:
    """Context manager: sample the GPU with nvidia-smi; yield a dict of values, filled at the end.

    Keys are `sm_mhz` (median), `sm_mhz_least` (minimum), `sm_mhz_max` (the GPU's limit), `watts` (median) and `celsius`
    (maximum). Values stay None without nvidia-smi or a GPU.
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
    """Parse the lines of nvidia-smi to the dict that `clocks` describes; empty if no line is complete.

    Skips incomplete lines and lines with [N/A].
    """
    read = pd.read_csv(io.StringIO(lines), names=["now", "top", "watts", "celsius"], skipinitialspace=True)
    whole = read.apply(pd.to_numeric, errors="coerce").dropna()
    if whole.empty:
        return {}
    return {
        "sm_mhz": whole["now"].median(), "sm_mhz_least": whole["now"].min(), "sm_mhz_max": whole["top"].max(),
        "watts": whole["watts"].median(), "celsius": whole["celsius"].max(),
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


def base_gib(model: nn.Module) -> float:
    """Return the GiB of a model's frozen base: weights, buffers, and the scales of weights that bitsandbytes packed."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    states = (parameter.quant_state for parameter in frozen if hasattr(parameter, "quant_state"))
    scales = [tensor for state in states for tensor in state.as_dict(packed=True).values()]
    return sum(tensor.nbytes for tensor in (*frozen, *model.buffers(), *scales)) / GIB
