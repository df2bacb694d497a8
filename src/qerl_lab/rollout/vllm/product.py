"""The adapter's product as one operation that torch.compile leaves alone. Imports no vLLM."""

import torch
from torch import Tensor

# Bounds of the routes on a GPU. On an H200 at rank 32 the kernels win in q/k/v, o and gate/up up to 256 rows, the most
# that were measured, and lose a microsecond in down_proj (results/bench/decode_7b.json). Beyond, the second bound is
# where others saw cuBLAS overtake a Triton expand (SGLang #26962).
SHRINK_ROWS, EXPAND_WORK = 256, 16_384


@torch.library.custom_op("qerl_lab::add_adapter", mutates_args={"y"})
def add_adapter(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """Add (x A_p^T) B_p^T to the columns of part p of `y`, in place, for the P parts of a layer.

    It is opaque to torch.compile, so that the route is chosen by the rows of a call, and a CUDA graph captures what
    that route launched. It reads A and B when it runs: what is written into them later acts in the next replay.

    Args:
        y: `[M, N]`, rows of any stride.
        x: `[M, K]`.
        A: `[P * r, K]`, those of the parts below each other.
        B: `[N, r]`, with the scaling in it.
        sizes: columns of the parts in `y`, N in sum.
    """
    add_products(y, x, A, B, sizes)


def add_products(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """As `add_adapter`, by torch's products."""
    rank, at = B.shape[1], 0
    inner = x @ A.t()
    for part, size in enumerate(sizes):
        columns, own = slice(at, at + size), slice(part * rank, (part + 1) * rank)
        y[:, columns].addmm_(inner[:, own], B[columns].t())
        at += size


@add_adapter.register_kernel("cuda")
def on_gpu(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    """As `add_adapter`, by kernels made for one adapter where they are thought faster than cuBLAS."""
    from qerl_lab.rollout.vllm import kernels  # needs triton

    rows, rank = x.shape[0], B.shape[1]
    if rank > kernels.MAX_RANK or rows * rank > EXPAND_WORK:
        add_products(y, x, A, B, sizes)
    elif rows > SHRINK_ROWS:
        kernels.expand(y, (x @ A.t())[None], B, sizes)
    elif rows:
        kernels.expand(y, kernels.shrink(x, A), B, sizes)


@add_adapter.register_fake
def _(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    return None
