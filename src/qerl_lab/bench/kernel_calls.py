"""Calls of the NVFP4 kernels with an adapter, as `bench decode` times them. Imports vllm."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

from qerl_lab.formats.nvfp4 import DIVISOR
from qerl_lab.formats.tiles import TILES, decoders, pack
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.product import add_adapter, tiles_product

# vLLM's kernels by name in `rollout.vllm.linear_backend`.
KERNELS = {"marlin": MarlinNvFp4LinearKernel, "humming": HummingNvFp4LinearKernel}


def call_each(calls: Iterable[Callable[[Tensor], object]], x: Tensor) -> None:
    """Run each call on the same rows, rewritten by a small kernel before each, as a norm does in an engine.

    Otherwise a kernel that starts early would overlap the call before it, an advantage that it only has in this
    benchmark.
    """
    for call in calls:
        x.mul_(1)
        call(x)


def with_adapter(
    call: Callable[[Tensor], Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]
) -> Callable[[Tensor], Tensor]:
    """Return a call followed by the adapter's product, as in an engine's layer."""

    def both(x: Tensor) -> Tensor:
        y = call(x)
        add_adapter(y, x, A, B, list(sizes))
        return y

    return both


def tiles_call(packed: Mapping[str, Tensor], A: Tensor, B: Tensor, sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return a call of `fp4_tiles`, adapter included, on copies of the weights."""
    codes, scale, divisor = packed.values()
    (N, columns), device = (len(codes), A.shape[1]), codes.device
    own = pack(codes, scale, fp4_tiles.tile_of_device(N, columns, device))
    A, B, divisor, meeting = A.clone(), B.clone(), divisor.clone(), fp4_tiles.counters(N, device)
    parts = decoders({TILES: own, DIVISOR: divisor}, sizes, columns)
    return lambda x: tiles_product(x, own, divisor, meeting, parts, A, B, list(sizes))


def kernel_call(backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N] as the engine's layers compute it with `linear_backend=backend`.

    Args:
        packed: result of `Nvfp4.quantize`, on the GPU; copied into the kernel's layout.
        sizes: columns of y by part (e.g. q, k, v), N in sum.
    """
    kernel, layer = KERNELS[backend](NvFp4LinearLayerConfig()), layer_of(packed, sizes)
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
