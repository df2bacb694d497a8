"""The adapter's product as one operation that torch.compile leaves alone. Imports no vLLM."""

import torch
from torch import Tensor


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
    rank, at = B.shape[1], 0
    inner = x @ A.t()
    for part, size in enumerate(sizes):
        columns, own = slice(at, at + size), slice(part * rank, (part + 1) * rank)
        y[:, columns].addmm_(inner[:, own], B[columns].t())
        at += size


@add_adapter.register_fake
def _(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    return None
