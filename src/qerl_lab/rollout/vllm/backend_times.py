"""Process that times kernels of 4-bit products: `python -m qerl_lab.rollout.vllm.backend_times TIMES.json`.

Started by `backends.milliseconds`, which sends the job as JSON on standard input.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.humming import HummingMxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.formats.format import Format
from qerl_lab.formats.marlin import DIVISOR
from qerl_lab.formats.tiles import TILES, decoders, pack
from qerl_lab.processes import end_with
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.backends import FP4_TILES, Shape
from qerl_lab.rollout.vllm.gpu_timing import graphed, side_by_side
from qerl_lab.rollout.vllm.product import add_adapter, tiles_product

# vLLM's kernels by format and by name in `rollout.vllm.linear_backend`.
KERNELS: dict[str, dict[str, Callable[[], Any]]] = {
    "nvfp4": {
        "marlin": lambda: MarlinNvFp4LinearKernel(NvFp4LinearLayerConfig()),
        "humming": lambda: HummingNvFp4LinearKernel(NvFp4LinearLayerConfig()),
    },
    "mxfp4": {
        "marlin": lambda: MarlinMxFp4LinearKernel(MxFp4LinearLayerConfig()),
        "humming": lambda: HummingMxFp4LinearKernel(MxFp4LinearLayerConfig()),
    },
}
COPIED_BYTES = 2**28  # weights per shape: more than fit in any cache


def main(words: list[str]) -> None:
    """Run the timing job and write milliseconds by kernel to a file."""
    asked = json.load(sys.stdin)
    end_with(asked["parent"])  # exit with the run, so that a killed one leaves nothing on the GPU
    torch.cuda.set_device(asked["device"])
    shapes = {(tuple(sizes), columns): count for (sizes, columns), count in asked["shapes"]}
    weight_format = formats.build(FormatConfig(**asked["format"]))
    times = milliseconds(asked["kernels"], weight_format, asked["rank"], shapes, asked["rows"])
    Path(*words).write_text(json.dumps(times), encoding="utf-8")


def milliseconds(
    kernels: Sequence[str], weight_format: Format, rank: int, shapes: Mapping[Shape, int], rows: Sequence[int]
) -> dict[str, float]:
    """Time the model's products with adapter by each kernel, summed over `rows`."""
    total = dict.fromkeys(kernels, 0.0)
    for (sizes, columns), count in shapes.items():
        packed = random_weight(weight_format, (sum(sizes), columns))
        copies = -(-COPIED_BYTES // sum(tensor.nbytes for tensor in packed.values()))
        A, B = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for size in
                ((len(sizes) * rank, columns), (sum(sizes), rank)))  # fmt: skip
        ways = {name: in_tiles if name == FP4_TILES else partial(apart, weight_format, name) for name in kernels}
        calls = {name: [way(packed, A, B, sizes) for _ in range(copies)] for name, way in ways.items()}
        for number in rows:
            x = torch.randn(number, columns, dtype=torch.bfloat16, device="cuda")
            works = {name: graphed(partial(call_each, calls[name], x)) for name in kernels}
            for name, ms in side_by_side(works, milliseconds=10).items():
                total[name] += count * ms / copies
    return total


def random_weight(weight_format: Format, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Make a packed weight with random codes on the GPU."""
    codes, *scales = weight_format.layout(shape).items()
    packed = {codes[0]: torch.randint(0, 256, codes[1][0], dtype=torch.uint8, device="cuda")}
    one = {torch.uint8: 127}  # E8M0 byte of 1.0
    return packed | {
        name: torch.full(size, one.get(dtype, 1), dtype=torch.float32, device="cuda").to(dtype)
        for name, (size, dtype) in scales
    }


def call_each(calls: Iterable[Callable[[Tensor], object]], x: Tensor) -> None:
    """Run each call on the same rows, rewritten by a small kernel before each, as a norm does in an engine.

    Otherwise a kernel that starts early would overlap the call before it, an advantage that it only has in this
    benchmark.
    """
    for call in calls:
        x.mul_(1)
        call(x)


def apart(
    weight_format: Format, backend: str, packed: Mapping[str, Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return a call of one of vLLM's kernels followed by the adapter's product, on copies of all weights."""
    return followed(product(weight_format, backend, packed, sizes), A.clone(), B.clone(), sizes)


def followed(
    call: Callable[[Tensor], Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return a call followed by the adapter's product, as in an engine's layer."""

    def both(x: Tensor) -> Tensor:
        y = call(x)
        add_adapter(y, x, A, B, list(sizes))
        return y

    return both


def in_tiles(packed: Mapping[str, Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a call of `fp4_tiles`, adapter included, on copies of the weights."""
    codes, scale, divisor = packed.values()
    (N, columns), device = (len(codes), A.shape[1]), codes.device
    own = pack(codes, scale, fp4_tiles.tile_here(N, columns, device))
    A, B, divisor, meeting = A.clone(), B.clone(), divisor.clone(), fp4_tiles.counters(N, device)
    parts = decoders({TILES: own, DIVISOR: divisor}, sizes, columns)
    return lambda x: tiles_product(x, own, divisor, meeting, parts, A, B, list(sizes))


def product(
    weight_format: Format, backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N] as the engine's layers compute it with `linear_backend=backend`.

    Args:
        packed: result of the format's `quantize`, on the GPU; copied into the kernel's layout.
        sizes: columns of y by part (e.g. q, k, v), N in sum.
    """
    kernel, layer = KERNELS[weight_format.NAME][backend](), layer_of(packed, sizes)
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
    if "weight_global_scale" in packed:
        layer.weight_global_scale = nn.Parameter(1 / packed["weight_global_scale"][0], requires_grad=False)
    return layer


if __name__ == "__main__":
    main(sys.argv[1:])
