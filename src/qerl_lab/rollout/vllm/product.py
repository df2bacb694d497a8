"""Products of a layer with its adapter. Imports vLLM only where a product calls its kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_lab.formats.format import Decoder
from qerl_lab.model.linear import scaled_linear

# Bounds of the routes on a GPU. On an H200 at rank 32 the kernels win up to 256 rows, the most measured, except where
# x A^T is large: for down_proj at 256 rows cuBLAS is faster by 1 microsecond of 13 (7B) and 6 of 17 (32B;
# results/bench/decode_*.json). The third bound is where others saw cuBLAS overtake a Triton expand (SGLang #26962).
SHRINK_ROWS, SHRINK_WORK, EXPAND_WORK = 256, 100_000_000, 16_384
MAX_RANK = 128  # supported by adapter_kernels.expand
UNPACK_ROWS = 2048  # from here unpacking and cuBLAS beat vLLM's kernels, which unpack as they multiply
TILES_ROWS = 320  # up to here five launches of `fp4_tiles` beat unpacking, 7B and 32B on an H200


@torch.library.custom_op("qerl_lab::add_adapter", mutates_args={"y"})
def add_adapter(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Add an adapter's product (x A_p^T) B_p^T to the columns of each part p of a fused layer's `y`, in place.

    Opaque to torch.compile, so that each call can choose kernels by its number of rows, and a CUDA graph captures the
    chosen ones. They read A and B when they run, so later writes to A and B take effect in the graph's next replay.

    Args:
        y: `[M, N]`, rows of any stride.
        x: `[M, K]`.
        A: `[P * r, K]`, the matrices A_p of the P parts (e.g. q, k, v) stacked, each with rank r.
        B: `[N, r]`, the matrices B_p stacked, scaling included.
        sizes: number of columns of each part in `y`, N in total.
    """
    add_products(y, x, A, B, sizes)


def add_products(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Add an adapter's product to `y` in place by torch's matrix products. Arguments are as in `add_adapter`."""
    rank, at = B.shape[1], 0
    inner = x @ A.t()
    for part, size in enumerate(sizes):
        columns, ranks = slice(at, at + size), slice(part * rank, (part + 1) * rank)
        y[:, columns].addmm_(inner[:, ranks], B[columns].t())
        at += size


@add_adapter.register_kernel("cuda")
def add_on_gpu(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Add an adapter's product to `y` in place by the lab's kernels, or by cuBLAS where that should be faster."""
    from qerl_lab.rollout.vllm import adapter_kernels  # needs triton

    rows = x.shape[0]
    if not expand_is_faster(rows, B.shape[1]):
        add_products(y, x, A, B, sizes)
    elif rows > SHRINK_ROWS or rows * A.numel() > SHRINK_WORK:
        adapter_kernels.expand(y, (x @ A.t())[None], B, sizes)
    elif rows:
        adapter_kernels.expand(y, adapter_kernels.shrink(x, A), B, sizes)


def expand_is_faster(rows: int, rank: int) -> bool:
    """Tell whether `adapter_kernels.expand` is expected to beat cuBLAS at this number of rows and rank."""
    return rank <= MAX_RANK and rows * rank <= EXPAND_WORK


def stacked_product(
    x: Tensor, stacked: Tensor, alpha: float, B: Tensor, sizes: list[int], bias: Tensor | None = None
) -> Tensor:
    """Return alpha * x W^T + bias plus the adapter's product, y `[M, N]`, for W and A stacked in one tensor.

    One cuBLAS product gives x W^T and x A^T side by side, which saves a launch and a pass over x. Both are rounded to
    the dtype of x before `adapter_kernels.expand` joins them.

    Args:
        x: `[M, K]`.
        stacked: `[N + P * r, K]`: W `[N, K]`, and below it A as in `add_adapter`.
        B, sizes: as in `add_adapter`.
        bias: `[N]`.
    """
    W, A = stacked.split([len(B), len(stacked) - len(B)])
    if not (x.is_cuda and expand_is_faster(len(x), B.shape[1])):
        y = scaled_linear(x, W, alpha, bias)
        add_adapter(y, x, A, B, sizes)
        return y
    from qerl_lab.rollout.vllm import adapter_kernels  # needs triton

    y, t = (x @ stacked.t()).split([len(W), len(A)], dim=1)
    out = x.new_empty(len(x), len(B))
    adapter_kernels.expand(y, t[None], B, sizes, alpha, bias, out)
    return out


def fp8_product(
    x: Tensor, W: Tensor, scale: Tensor, A: Tensor, B: Tensor, sizes: list[int], bias: Tensor | None = None
) -> Tensor:
    """Return x (scale * W)^T + bias plus the adapter's product, y `[M, N]`. Multiplies with W in FP8.

    vLLM's kernels round each row of x to FP8 (E4M3), with a scale per row, and multiply it with W. The adapter's
    product takes x unrounded.

    Args:
        x: bfloat16 or float16 `[M, K]`.
        W: float8_e4m3fn `[N, K]`.
        scale: float32 `[N, 1]`.
        A, B, sizes: as in `add_adapter`.
        bias: `[N]`.
    """
    from vllm import _custom_ops as ops

    rounded, scale_of_rows = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    y = ops.cutlass_scaled_mm(rounded, W.t(), scale_of_rows, scale, x.dtype, bias)
    add_adapter(y, x, A, B, sizes)
    return y


def unpacked_product(
    x: Tensor, decoders: Sequence[Decoder], A: Tensor, B: Tensor, sizes: list[int], bias: Tensor | None = None
) -> Tensor:
    """Return x W^T + bias plus the adapter's product, y `[M, N]`. Unpacks the whole weight of each part for cuBLAS.

    Computes the adapter's product first, because cuBLAS can add the large product to it without another launch.
    `decoders` unpack the parts of W, in order; `A` is as in `add_adapter`, other arguments as in `stacked_product`.
    """
    y, t = x.new_empty(len(x), len(B)), x @ A.t()
    biases = len(sizes) * [None] if bias is None else bias.split(sizes)
    of_parts = zip(decoders, y.split(sizes, 1), t.split(B.shape[1], 1), B.split(sizes), biases, strict=True)
    for decoder, y_of_part, t_of_part, B_of_part, bias_of_part in of_parts:
        if bias_of_part is None:
            torch.mm(t_of_part, B_of_part.t(), out=y_of_part)
        else:
            torch.addmm(bias_of_part, t_of_part, B_of_part.t(), out=y_of_part)
        y_of_part.addmm_(x, decoder.unpack(x.dtype).t(), alpha=decoder.alpha)
    return y


@add_adapter.register_fake
def _change_no_shape(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Serve as fake kernel for torch.compile: do nothing, because `y` keeps its shape."""
