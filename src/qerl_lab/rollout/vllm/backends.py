"""vLLM's kernels for the product of an NVFP4 weight with few rows, outside of an engine: to be timed."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel

KERNELS = {"marlin": MarlinNvFp4LinearKernel, "humming": HummingNvFp4LinearKernel}


def product(backend: str, packed: Mapping[str, Tensor], sizes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Return x[M, K] -> x W^T [M, N], as the layers of an engine compute it with `linear_backend`.

    Args:
        backend: a name in KERNELS.
        packed: as `Nvfp4.quantize` gives it, on the GPU; it is copied into the kernel's own layout.
        sizes: columns of y by part (of q, k and v, say), N in sum.
    """
    kernel, layer = KERNELS[backend](NvFp4LinearLayerConfig()), nn.Module()
    rows, half = packed["weight_packed"].shape
    about = {
        "input_size_per_partition": 2 * half, "output_size_per_partition": rows, "output_partition_sizes": list(sizes),
        "logical_widths": list(sizes), "params_dtype": torch.bfloat16, "has_bias": False,
    }  # fmt: skip
    for name, value in about.items():
        setattr(layer, name, value)
    # The names that its schemes give them; the divisor turned into a factor.
    layer.weight = nn.Parameter(packed["weight_packed"].clone(), requires_grad=False)
    layer.weight_scale = nn.Parameter(packed["weight_scale"].clone(), requires_grad=False)
    layer.weight_global_scale = nn.Parameter(1 / packed["weight_global_scale"][0], requires_grad=False)
    kernel.process_weights_after_loading(layer)
    return lambda x: kernel.apply_weights(layer, x)
