"""Which of vLLM's kernels computes the products of 4-bit weights: the fastest here, timed once.

vLLM takes the first of a list. Which is fastest depends on the GPU, the shapes of the model and the rows of a batch.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import vllm
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.mxfp4.base import MxFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.mxfp4.humming import HummingMxFp4LinearKernel
from vllm.model_executor.kernels.linear.mxfp4.marlin import MarlinMxFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

from qerl_lab import formats
from qerl_lab.config.schema import RunConfig
from qerl_lab.disk import replace_file
from qerl_lab.formats.format import Format
from qerl_lab.model import gguf
from qerl_lab.model.linear import PackedLinear, fused_groups
from qerl_lab.timing import graphed, side_by_side

# By format and by their names in `rollout.vllm.linear_backend`.
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
Shape = tuple[tuple[int, ...], int]  # columns of y by part, columns of x


def chosen(cfg: RunConfig, model: nn.Module) -> str:
    """Return `rollout.vllm.linear_backend` in vLLM's words: for `auto` the fastest for the layers of `model`.

    vLLM's own choice, which it calls auto, for formats whose kernels are not timed. Times are kept beside unpacked GGUF
    files, by GPU, version of vLLM, format, shapes and rows.
    """
    asked = cfg.rollout.vllm.linear_backend
    if asked in ("marlin", "humming"):
        return asked
    if asked == "vllm" or cfg.format.name not in KERNELS or not torch.cuda.is_available():
        return "auto"
    shapes, rows = shapes_of(model), rows_of(cfg)
    about = [torch.cuda.get_device_name(), vllm.__version__, cfg.format.name, sorted(shapes.items()), rows]
    key, file = json.dumps(about), gguf.store() / "linear_backend.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if key not in known:
        known[key] = milliseconds(formats.build(cfg.format), shapes, rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(known, indent=1).encode(), aside=str(os.getpid()))  # two runs may time at once
    times = known[key]
    fastest = min(times, key=lambda name: times[name])
    said = ", ".join(f"{name} {ms:.2f} ms" for name, ms in times.items())
    print(f"linear_backend={fastest}: the model's products at {', '.join(map(str, rows))} rows take {said}")
    return fastest


def shapes_of(model: nn.Module) -> Counter[Shape]:
    """How often each shape of packed layer comes, as engines fuse them."""
    layers = {  # PEFT puts a layer around those with an adapter
        name.removesuffix(".base_layer"): layer for name, layer in model.named_modules()
        if isinstance(layer, PackedLinear)
    }  # fmt: skip
    groups = ([layers[name] for name in group] for group in fused_groups(list(layers)))
    return Counter((tuple(layer.out_features for layer in group), group[0].in_features) for group in groups)


def rows_of(cfg: RunConfig) -> list[int]:
    """Rows of decoding: a full batch, and what is left of it when half and three quarters of the completions ended."""
    full = min(cfg.rollout.batch_size, cfg.completions_per_gpu)
    return sorted({full, -(-full // 2), -(-full // 4)}, reverse=True)


def milliseconds(weight_format: Format, shapes: Mapping[Shape, int], rows: Sequence[int]) -> dict[str, float]:
    """Time of the model's products by each kernel, the sum over `rows`."""
    total = dict.fromkeys(KERNELS[weight_format.NAME], 0.0)
    for (sizes, columns), count in shapes.items():
        packed = random_weight(weight_format, (sum(sizes), columns))
        copies = -(-COPIED_BYTES // sum(tensor.nbytes for tensor in packed.values()))
        calls = {name: [product(weight_format, name, packed, sizes) for _ in range(copies)] for name in total}
        for number in rows:
            x = torch.randn(number, columns, dtype=torch.bfloat16, device="cuda")
            works = {name: graphed(partial(call_each, calls[name], x)) for name in total}
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
    """Call each with the same rows."""
    for call in calls:
        call(x)


def product(
    weight_format: Format, backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N], as the layers of an engine compute it with `linear_backend=backend`.

    Args:
        packed: as the format's `quantize` gives it, on the GPU; it is copied into the kernel's own layout.
        sizes: columns of y by part (of q, k and v, say), N in sum.
    """
    kernel, layer = KERNELS[weight_format.NAME][backend](), nn.Module()
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
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)
