"""The kernels of one adapter's product against float64: on a GPU, and in Triton's interpreter on a CPU."""

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from qerl_lab.rollout.vllm import adapter_kernels
from qerl_lab.rollout.vllm import product as product_of_adapter
from qerl_lab.rollout.vllm.adapter_kernels import PROGRAMS, blocks_of, expand, shrink
from qerl_lab.rollout.vllm.product import EXPAND_WORK, SHRINK_ROWS, add_on_gpu, stacked_product

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
NEAR = {torch.bfloat16: 2**-7, torch.float32: 1e-5}
DTYPES = list(NEAR) if INTERPRETED else [torch.bfloat16]
# Rows, columns of x, columns of the parts of y, rank: blocks that are full, cut, and single.
SHAPES = [(1, 64, [17], 1), (5, 300, [160, 40, 40], 7), (8, 1024, [128], 16), (16, 896, [256, 128, 128], 32),
          (33, 1000, [257, 130], 20), (64, 640, [96, 96], 64), (70, 1536, [65], 128)]  # fmt: skip


def graphed(work: Callable[[], object]) -> Callable[[], object]:
    """Record `work` as a CUDA graph: its kernels without the time that Python takes to launch them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def operands(rows: int, columns: int, sizes: list[int], rank: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw operands with products of magnitude 1."""
    generator = torch.Generator().manual_seed(rows)
    R, N = len(sizes) * rank, sum(sizes)
    shapes = {"y": (rows, N), "x": (rows, columns), "A": (R, columns), "B": (N, rank)}
    scale = {"A": columns**-0.5, "B": rank**-0.5}
    return {
        name: (scale.get(name, 1) * torch.randn(shape, generator=generator)).to(dtype).to(DEVICE)
        for name, shape in shapes.items()
    }


def product(x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> Tensor:
    blocks = zip(A.double().split(len(A) // len(sizes)), B.double().split(sizes), strict=True)
    return torch.cat([x.double() @ a.t() @ b.t() for a, b in blocks], dim=1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shrink_sums_over_pieces_of_k_and_expand_adds_each_parts_product_in_place(
    shape: tuple, dtype: torch.dtype
) -> None:
    """Shrink sums in float32. Only the rounding of t and y differs from float64. Memory beside y keeps its values."""
    given = operands(*shape, dtype)
    rows, columns, sizes, rank = shape
    sums = shrink(given["x"], given["A"])
    assert sums.shape[1:] == (rows, len(sizes) * rank)
    assert len(sums) > 1 or columns < 256
    exact = given["x"].double() @ given["A"].double().t()
    torch.testing.assert_close(sums.double().sum(0), exact, rtol=1e-5, atol=1e-5)

    wide = torch.full((rows, sum(sizes) + 24), 7.0, dtype=dtype, device=DEVICE)
    y = wide[:, : sum(sizes)]
    y.copy_(given["y"])
    expand(y, sums, given["B"], sizes)
    added = product(given["x"], given["A"], given["B"], sizes)
    band = NEAR[dtype]
    torch.testing.assert_close(y.double(), given["y"].double() + added, rtol=band, atol=4 * band)
    assert added.abs().mean() > 20 * band
    assert (wide[:, sum(sizes) :] == 7).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_expand_adds_scaled_product_bias_and_adapters(shape: tuple, biased: bool) -> None:
    """y and t are columns of one tensor, the product with weight and A stacked. Neither changes."""
    given, (_, columns, sizes, rank) = operands(*shape, torch.bfloat16), shape
    N, alpha = sum(sizes), 0.37
    W = torch.randn(N, columns, generator=torch.Generator().manual_seed(1)).to(given["x"]) / columns**0.5
    bias = given["B"].sum(1) if biased else None
    both = given["x"] @ torch.cat([W, given["A"]]).t()
    y, t = both.split([N, len(sizes) * rank], dim=1)
    before, out = both.clone(), torch.full_like(y, 7.0, memory_format=torch.contiguous_format)
    expand(y, t[None], given["B"], sizes, alpha, bias, out)
    exact = alpha * given["x"].double() @ W.double().t() + product(given["x"], given["A"], given["B"], sizes)
    exact += 0 if bias is None else bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=2**-7, atol=2**-5)
    assert torch.equal(both, before)


@pytest.mark.skipif(INTERPRETED, reason="on a CPU the weight and A are multiplied one after the other")
@pytest.mark.parametrize("rows", [0, 1, 192, EXPAND_WORK // 32, EXPAND_WORK // 32 + 1])
def test_a_stacked_product_is_weight_plus_bias_plus_adapter(rows: int) -> None:
    given, sizes = operands(rows, 512, [96, 32], 32, torch.bfloat16), [96, 32]
    W = torch.randn(128, 512, generator=torch.Generator().manual_seed(1)).to(given["x"]) / 512**0.5
    bias = given["B"].sum(1)
    y = stacked_product(given["x"], torch.cat([W, given["A"]]), 0.37, given["B"], sizes, bias)
    exact = 0.37 * given["x"].double() @ W.double().t() + bias.double()
    exact += product(given["x"], given["A"], given["B"], sizes)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize(("rows", "columns", "blocks"), [
    (8, 37_888, (16, 128, 4)), (17, 3584, (32, 64, 4)), (64, 4608, (32, 64, 4)), (32, 37_888, (32, 128, 4)),
    (64, 37_888, (32, 256, 8)), (256, 3584, (32, 64, 4)), (256, 18_944, (32, 256, 8)),
])  # fmt: skip
def test_programs_for_a_wide_y_are_wide_if_they_still_fill_the_gpu(
    rows: int, columns: int, blocks: tuple[int, ...]
) -> None:
    assert blocks_of(rows, columns) == blocks
    programs = -(-rows // blocks[0]) * -(-columns // blocks[1])
    assert blocks[1] in (64, 128) or programs >= 2 * PROGRAMS


@pytest.mark.parametrize(("programs", "wide"), [(2, 256), (4, 128)])
@pytest.mark.parametrize("sizes", [[300, 270], [513, 64]], ids=str)
def test_wide_programs_give_the_same_product(
    monkeypatch: pytest.MonkeyPatch, programs: int, wide: int, sizes: list[int]
) -> None:
    """A GPU with few multiprocessors gets wide programs, so a part can end inside a program."""
    monkeypatch.setattr(adapter_kernels, "PROGRAMS", programs)
    assert blocks_of(40, sum(sizes))[1] == wide
    given = operands(40, 256, sizes, 20, torch.bfloat16)
    y = given["y"].clone()
    expand(y, shrink(given["x"], given["A"]), given["B"], sizes)
    exact = given["y"].double() + product(given["x"], given["A"], given["B"], sizes)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-5)


def test_the_same_inputs_give_the_same_bits() -> None:
    given = operands(*SHAPES[3], torch.bfloat16)
    runs = [given["y"].clone() for _ in range(3)]
    for y in runs:
        expand(y, shrink(given["x"], given["A"]), given["B"], SHAPES[3][2])
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("rows", [0, SHRINK_ROWS, SHRINK_ROWS + 1, EXPAND_WORK // 128 + 1])
def test_every_route_gives_the_same_product(rows: int) -> None:
    given, sizes = operands(rows, 512, [96, 32], 128, torch.bfloat16), [96, 32]
    y = given["y"].clone()
    add_on_gpu(y, given["x"], given["A"], given["B"], sizes)
    exact = given["y"].double() + product(given["x"], given["A"], given["B"], sizes)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-5)


@pytest.mark.parametrize(("rows", "by_cublas"), [(3, False), (4, True)])
def test_cublas_takes_over_shrink_above_a_bound(monkeypatch: pytest.MonkeyPatch, rows: int, by_cublas: bool) -> None:
    """The bound is the number of products in x A^T with 3 rows; 4 rows exceed it."""
    given, sizes = operands(rows, 512, [96, 32], 16, torch.bfloat16), [96, 32]
    shrunk, real = [], adapter_kernels.shrink
    monkeypatch.setattr(product_of_adapter, "SHRINK_WORK", 3 * given["A"].numel())
    monkeypatch.setattr(adapter_kernels, "shrink", lambda x, A: shrunk.append(x) or real(x, A))
    y = given["y"].clone()
    add_on_gpu(y, given["x"], given["A"], given["B"], sizes)
    exact = given["y"].double() + product(given["x"], given["A"], given["B"], sizes)
    torch.testing.assert_close(y.double(), exact, rtol=2**-7, atol=2**-5)
    assert (not shrunk) == by_cublas


@pytest.mark.skipif(INTERPRETED, reason="launches overlap only on a GPU")
def test_a_chain_of_layers_in_a_graph_gives_the_bits_of_one_kernel_at_a_time() -> None:
    """A launch in a graph begins before the launch ahead of it ends; a launch between synchronizations does not."""
    rows, columns, sizes, rank = 16, 2048, [1024, 512, 512], 32
    given = operands(rows, columns, sizes, rank, torch.bfloat16)
    W, A, B = torch.eye(columns, dtype=torch.bfloat16, device=DEVICE), given["A"], given["B"]
    made = torch.empty(40, rows, columns, dtype=torch.bfloat16, device=DEVICE)

    def layer(x: Tensor, y: Tensor, wait: Callable[[], None]) -> None:
        torch.mm(x, W, out=y)
        wait()
        sums = shrink(x, A)
        wait()
        expand(y, sums, B, sizes)
        wait()

    def chain(wait: Callable[[], None]) -> None:
        x = given["x"]
        for y in made:
            layer(x, y, wait)
            x = y / y.abs().max()

    chain(torch.cuda.synchronize)
    alone, replay = made.clone(), graphed(partial(chain, lambda: None))
    for _ in range(20):
        made.zero_()
        replay()
        torch.cuda.synchronize()
        assert torch.equal(made, alone)
    assert alone[-1].isfinite().all()
    assert not torch.equal(alone[-1], alone[-2])
