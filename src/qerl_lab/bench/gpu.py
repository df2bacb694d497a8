"""Read clock speed, power, temperature and memory of the GPU."""

import csv
import io
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
import torch
from torch import nn

from qerl_lab.config.units import GIB

READ = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}  # nvidia-smi's name by column


@contextmanager
def clocks() -> Iterator[dict[str, float | None]]:
    """Context manager: measure clock (MHz), power (watts) and temperature (celsius) of the GPU during a `with` block.

    Yields a dict with the keys of READ. Its values are None during the block. After it clock and power are the medians
    of what nvidia-smi printed, and the temperature is the maximum. All stay None without nvidia-smi or a GPU.
    """
    row: dict[str, float | None] = dict.fromkeys(READ)
    program = shutil.which("nvidia-smi")
    if program is None or not torch.cuda.is_available():
        yield row
        return
    this = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    query = f"--query-gpu={','.join(READ.values())}"
    command = [program, "-i", this, query, "--format=csv,noheader,nounits", "-lms", "250"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield row
    finally:
        process.terminate()
        row |= parse_clocks(process.communicate()[0])


def parse_clocks(lines: str) -> dict[str, float | None]:
    """Parse the lines that nvidia-smi printed; return the values that `clocks` describes, with the keys of READ.

    Skips incomplete or odd lines and lines with [N/A]. Returns an empty dict if no line is left.
    """
    read = pd.read_csv(
        io.StringIO(lines), names=list(READ), skipinitialspace=True, quoting=csv.QUOTE_NONE, on_bad_lines="skip"
    )
    whole = read.apply(pd.to_numeric, errors="coerce").dropna()
    return {} if whole.empty else whole.agg({"sm_mhz": "median", "watts": "median", "celsius": "max"}).to_dict()


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
