"""The process that times kernels of 4-bit products: `python -m qerl_lab.rollout.vllm.backend_times TIMES.json`.

Started by `backends.milliseconds`, which says on standard input what to time.
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
from qerl_lab.parent import end_with
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.backends import FP4_TILES, Shape
from qerl_lab.rollout.vllm.gpu_timing import graphed, side_by_side
from qerl_lab.rollout.vllm.product import add_adapter, tiles_product

# vLLM's, by format and by their names in `rollout.vllm.linear_backend`.
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
COPIED_BYTES = 2**28  # of each shape's weights: more than any cache holds


def main(words: list[str]) -> None:
    """Time what is asked, and write the milliseconds by kernel."""
    asked = json.load(sys.stdin)
    end_with(asked["parent"])  # a run that is killed leaves nothing on the GPU
    torch.cuda.set_device(asked["device"])
    shapes = {(tuple(sizes), columns): count for (sizes, columns), count in asked["shapes"]}
    weight_format = formats.build(FormatConfig(**asked["format"]))
    times = milliseconds(asked["kernels"], weight_format, asked["rank"], shapes, asked["rows"])
    Path(*words).write_text(json.dumps(times), encoding="utf-8")


def milliseconds(
    kernels: Sequence[str], weight_format: Format, rank: int, shapes: Mapping[Shape, int], rows: Sequence[int]
) -> dict[str, float]:
    """Time of the model's products with an adapter by each kernel, the sum over `rows`."""
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
    """A packed weight whose bits are random, on the GPU."""
    codes, *scales = weight_format.layout(shape).items()
    packed = {codes[0]: torch.randint(0, 256, codes[1][0], dtype=torch.uint8, device="cuda")}
    one = {torch.uint8: 127}  # the exponent 0 of an E8M0 scale
    return packed | {
        name: torch.full(size, one.get(dtype, 1), dtype=torch.float32, device="cuda").to(dtype)
        for name, (size, dtype) in scales
    }


def call_each(calls: Iterable[Callable[[Tensor], object]], x: Tensor) -> None:
    """Call each with the same rows, which a small kernel writes before each, as a norm does in an engine.

    Right behind the call before it, a kernel that may begin early would hide its start, and by that win here alone.
    """
    for call in calls:
        x.mul_(1)
        call(x)


def apart(
    weight_format: Format, backend: str, packed: Mapping[str, Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """The product by one of vLLM's kernels, and the adapter's behind it, on copies of all weights."""
    return followed(product(weight_format, backend, packed, sizes), A.clone(), B.clone(), sizes)


def followed(
    call: Callable[[Tensor], Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """The call, and the adapter's product behind it, as a layer of an engine has both."""

    def both(x: Tensor) -> Tensor:
        y = call(x)
        add_adapter(y, x, A, B, list(sizes))
        return y

    return both


def in_tiles(packed: Mapping[str, Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Both as an engine with `fp4_tiles` has them, on copies of the weights."""
    codes, scale, divisor = packed.values()
    (N, columns), device = (len(codes), A.shape[1]), codes.device
    own = pack(codes, scale, fp4_tiles.tile_here(N, columns, device))
    A, B, divisor, meeting = A.clone(), B.clone(), divisor.clone(), fp4_tiles.counters(N, device)
    parts = decoders({TILES: own, DIVISOR: divisor}, sizes, columns)
    return lambda x: tiles_product(x, own, divisor, meeting, parts, A, B, list(sizes))


def product(
    weight_format: Format, backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N], as the layers of an engine compute it with `linear_backend=backend`.

    Args:
        packed: as the format's `quantize` gives it, on the GPU; it is copied into the kernel's own layout.
        sizes: columns of y by part (of q, k and v, say), N in sum.
    """
    kernel, layer = KERNELS[weight_format.NAME][backend](), layer_of(packed, sizes)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)


def layer_of(packed: Mapping[str, Tensor], sizes: Sequence[int]) -> nn.Module:
    """A layer with a copy of a packed weight, as vLLM's kernels find it when it is loaded."""
    layer = nn.Module()
    rows, half = packed["weight_packed"].shape
    about = {
        "input_size_per_partition": 2 * half, "output_size_per_partition": rows, "output_partition_sizes": list(sizes),
        "logical_widths": list(sizes), "params_dtype": torch.bfloat16, "has_bias": False,
    }  # fmt: skip
    for name, value in about.items():
        setattr(layer, name, value)
    # The names that vLLM's schemes give them; the divisor turned into a factor.
    layer.weight = nn.Parameter(packed["weight_packed"].clone(), requires_grad=False)
    layer.weight_scale = nn.Parameter(packed["weight_scale"].clone(), requires_grad=False)
    if "weight_global_scale" in packed:
        layer.weight_global_scale = nn.Parameter(1 / packed["weight_global_scale"][0], requires_grad=False)
    return layer


if __name__ == "__main__":
    main(sys.argv[1:])
