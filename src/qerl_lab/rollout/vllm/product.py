"""The adapter's product as one operation that torch.compile leaves alone. Imports no vLLM."""

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_lab.formats.format import Decoder
from qerl_lab.model.linear import scaled_linear
from qerl_lab.rollout.vllm import fp4_tiles

# Bounds of the routes on a GPU. On an H200 at rank 32 the kernels win up to 256 rows, the most that were measured, but
# where x A^T is work: in down_proj of 7B at 256 rows cuBLAS is faster by 1 microsecond of 13, in that of 32B by 6 of 17
# (results/bench/decode_*.json). The third bound is where others saw cuBLAS overtake a Triton expand (SGLang #26962).
SHRINK_ROWS, SHRINK_WORK, EXPAND_WORK = 256, 100_000_000, 16_384
MAX_RANK = 128  # of kernels.expand
UNPACK_ROWS = 2048  # from which unpacking and cuBLAS are faster than vLLM's kernels, which unpack as they multiply
TILES_ROWS = 320  # up to which five launches of `fp4_tiles` are faster than these, 7B and 32B on an H200


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

    rows = x.shape[0]
    if not expands(rows, B.shape[1]):
        add_products(y, x, A, B, sizes)
    elif rows > SHRINK_ROWS or rows * A.numel() > SHRINK_WORK:
        kernels.expand(y, (x @ A.t())[None], B, sizes)
    elif rows:
        kernels.expand(y, kernels.shrink(x, A), B, sizes)


def expands(rows: int, rank: int) -> bool:
    """Whether `kernels.expand` is thought faster than cuBLAS."""
    return rank <= MAX_RANK and rows * rank <= EXPAND_WORK


def stacked_product(
    x: Tensor, stacked: Tensor, alpha: float, B: Tensor, sizes: list[int], bias: Tensor | None = None
) -> Tensor:
    """Return alpha * x W^T + bias and the adapter's product, y `[M, N]`.

    One product of cuBLAS gives x W^T and t = x A^T side by side: a launch and a pass over x less than `add_adapter`
    after it. Both are rounded to the dtype of x before `expand` joins them, as y and t are there.

    Args:
        x: `[M, K]`.
        stacked: `[N + P * r, K]`, W and below it A.
        B, sizes: as in `add_adapter`.
        bias: `[N]`.
    """
    W, A = stacked.split([len(B), len(stacked) - len(B)])
    if not (x.is_cuda and expands(len(x), B.shape[1])):
        y = scaled_linear(x, W, alpha, bias)
        add_adapter(y, x, A, B, sizes)
        return y
    from qerl_lab.rollout.vllm import kernels  # needs triton

    y, t = (x @ stacked.t()).split([len(W), len(A)], dim=1)
    out = x.new_empty(len(x), len(B))
    kernels.expand(y, t[None], B, sizes, alpha, bias, out)
    return out


def unpacked_product(
    x: Tensor, decoders: Sequence[Decoder], A: Tensor, B: Tensor, sizes: list[int], bias: Tensor | None = None
) -> Tensor:
    """Return x W^T + bias and the adapter's product, y `[M, N]`, each weight unpacked whole and multiplied by cuBLAS.

    The adapter's product comes first, and the large one adds to it in its epilogue: y is written twice and read once.

    Args:
        x: `[M, K]`.
        decoders: those of the parts, whose weights lie below each other in W.
        A, B, sizes: as in `add_adapter`.
        bias: `[N]`.
    """
    y, t = x.new_empty(len(x), len(B)), x @ A.t()
    biases = len(sizes) * [None] if bias is None else bias.split(sizes)
    of_parts = zip(decoders, y.split(sizes, 1), t.split(B.shape[1], 1), B.split(sizes), biases, strict=True)
    for decoder, own, inner, B_of_part, added in of_parts:
        if added is None:
            torch.mm(inner, B_of_part.t(), out=own)
        else:
            torch.addmm(added, inner, B_of_part.t(), out=own)
        own.addmm_(x, decoder.unpack(x.dtype).t(), alpha=decoder.alpha)
    return y


def tiles_product(
    x: Tensor, packed: Tensor, divisor: Tensor, meeting: Tensor, decoders: Sequence[Decoder], A: Tensor, B: Tensor,
    sizes: list[int], bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As `unpacked_product`, up to `TILES_ROWS` rows by launches of `fp4_tiles`; `packed` to `meeting` are as there."""
    if len(x) > TILES_ROWS:
        return unpacked_product(x, decoders, A, B, sizes, bias)
    return fp4_tiles.linear(x, packed, divisor, A, B, sizes, meeting, bias)


@add_adapter.register_fake
def _(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> None:
    return None
