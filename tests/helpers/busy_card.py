"""Check whether a kernel's product stays right while other processes use the GPU.

    PYTHONPATH=src python tests/helpers/busy_card.py [LOOPS] [PROCESSES]

Needs a GPU and vLLM. Prints for each Linear of SmolLM2, kernel and row count how many launches were wrong, and where.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig

BUSY = """
import torch
x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
while True:
    for _ in range(50):
        x @ x
    torch.cuda.synchronize()
"""
SMOLLM2 = {"qkv": ([576, 192, 192], 576), "gate_up": ([1536, 1536], 576), "o": ([576], 576), "down": ([576], 1536)}


@contextmanager
def others(count: int) -> Iterator[None]:
    """Keep the GPU busy with `count` processes."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    time.sleep(15 if count else 0)  # until torch is imported
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def off(backend: str, layer: str, rows: int, loops: int) -> tuple[int, list[int], list[int]]:
    """Return the number of wrong launches, and the blocks of 256 columns and rows of x that were ever wrong."""
    from qerl_lab.bench.decode import kernel_call

    nvfp4 = formats.build(FormatConfig(name="nvfp4"))
    sizes, columns = SMOLLM2[layer]
    shape = sum(sizes), columns
    packed = nvfp4.quantize(torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 24)
    call = kernel_call(backend, packed, sizes)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    right = x.float() @ nvfp4.dequantize(packed, shape, torch.float32).t()
    wrong = torch.zeros(rows, sum(sizes), dtype=torch.bool, device="cuda")
    launches = torch.zeros((), dtype=torch.long, device="cuda")
    for _ in range(loops):
        now = ~((call(x).float() - right).abs() < 0.15 + 0.05 * right.abs())
        wrong |= now
        launches += now.any()
    blocks = wrong.any(0).nonzero().flatten().div(256, rounding_mode="floor").unique().tolist()
    return int(launches), blocks, wrong.any(1).nonzero().flatten().tolist()


def main(loops: int, count: int) -> None:
    """Print a line for each Linear, kernel and row count."""
    with others(count):
        for layer in SMOLLM2:
            for backend in ("marlin", "humming"):
                for rows in (512, 4096):
                    launches, blocks, at = off(backend, layer, rows, loops)
                    where = f", blocks of 256 columns {blocks}, {len(at)} rows from {at[0]} to {at[-1]}" if at else ""
                    print(f"{layer} {backend} {rows} rows: {launches} of {loops} launches off{where}", flush=True)


if __name__ == "__main__":
    loops, count = (*sys.argv[1:], *("3000", "3")[len(sys.argv) - 1 :])
    main(int(loops), int(count))
