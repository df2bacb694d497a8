"""Check whether a kernel's product stays right while other processes use the GPU.

    PYTHONPATH=src python tests/helpers/busy_card.py [LOOPS] [PROCESSES]

Needs a GPU and vLLM. Prints for each Linear of SmolLM2, kernel and row count how many launches were wrong, and where.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

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


def kernel_call(backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N] as the engine's layers compute it with `linear_backend=backend`.

    Args:
        packed: result of `Nvfp4.quantize`, on the GPU; copied into the kernel's layout.
        sizes: columns of y by part (e.g. q, k, v), N in sum.
    """
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
    from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

    kind = {"marlin": MarlinNvFp4LinearKernel, "humming": HummingNvFp4LinearKernel}[backend]
    kernel, layer = kind(NvFp4LinearLayerConfig()), layer_of(packed, sizes)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


def layer_of(packed: Mapping[str, Tensor], sizes: Sequence[int]) -> nn.Module:
    """Build a layer with a copy of a packed weight, as vLLM's kernels expect it after loading."""
    layer = nn.Module()
    rows, half = packed["weight_packed"].shape
    about = {
        "input_size_per_partition": 2 * half, "output_size_per_partition": rows, "output_partition_sizes": list(sizes),
        "logical_widths": list(sizes), "params_dtype": torch.bfloat16, "has_bias": False,
    }  # fmt: skip
    for name, value in about.items():
        setattr(layer, name, value)
    # Names as in vLLM's schemes; vLLM multiplies by the global scale's inverse.
    layer.weight = nn.Parameter(packed["weight_packed"].clone(), requires_grad=False)
    layer.weight_scale = nn.Parameter(packed["weight_scale"].clone(), requires_grad=False)
    layer.weight_global_scale = nn.Parameter(1 / packed["weight_global_scale"][0], requires_grad=False)
    return layer


def off(backend: str, layer: str, rows: int, loops: int) -> tuple[int, list[int], list[int]]:
    """Return the number of wrong launches, and the blocks of 256 columns and rows of x that were ever wrong."""
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
