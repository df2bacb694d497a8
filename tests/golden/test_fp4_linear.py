"""The NVFP4 product for few rows against the dequantized weight: on a GPU, or on a CPU, where a fiber is a thread.

Between the two stands what tests/helpers/cuda_on_cpu.h says that CUDA does.
"""

import ctypes

import pytest
import torch
from torch import Tensor

from kernels_on_cpu import every_code, library, pointers
from packed_layers import NVFP4
from qerl_lab.config.engine_rules import FP4_MAX_RANK
from qerl_lab.rollout.vllm import fp4_linear
from qerl_lab.rollout.vllm.fp4_linear import (
    MAX_RANK,
    MAX_ROWS,
    SOURCE,
    Machine,
    Plan,
    Shape,
    counters,
    linear,
    plan,
)

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SMALL = Machine(multiprocessors=5, shared_bytes=128 * 2**10)
H200 = Machine(multiprocessors=132, shared_bytes=227 * 2**10)
# Rows, K, columns of the parts, rank: pieces of K one and several, tiles of a block one and several, of one part and
# of more.
SHAPES = [(1, 512, [64], 2), (5, 1024, [96, 32, 32], 32), (8, 2048, [128], 16), (3, 1536, [64, 64], 30),
          (8, 4864, [32, 16], 64), (7, 1024, [48], 128), (4, 4864, [48, 16, 48], 118)]  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel as a library."""
    return library(SOURCE, tmp_path_factory.mktemp("kernel"))


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no GPU, a small one is played."""
    if ON_GPU:
        return
    on_cpu = request.getfixturevalue("on_cpu")

    def launch(how: Plan, tensors: list[Tensor | None], shape: Shape) -> None:
        on_cpu.launch(how.blocks, how.threads, how.shared_bytes, pointers(tensors), ctypes.byref(shape))

    monkeypatch.setattr(fp4_linear, "_launch", launch)
    monkeypatch.setattr(fp4_linear, "machine_of", lambda device: SMALL)


def operands(rows: int, columns: int, sizes: list[int], rank: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of `linear` but `sizes`, and what it should give in float64, of summands of the size of 1."""
    generator = torch.Generator().manual_seed(rows)
    R, N = len(sizes) * rank, sum(sizes)
    dense = columns**-0.5 * torch.randn(N, columns, generator=generator)
    packed = NVFP4.quantize(dense)
    shapes = {"x": (rows, columns), "A": (R, columns), "B": (N, rank), "bias": (N,)}
    scale = {"A": columns**-0.5, "B": rank**-0.5}
    given = {
        name: (scale.get(name, 1) * torch.randn(shape, generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }
    x, A, B, bias = (given[name].double() for name in shapes)
    added = torch.cat([x @ a.t() @ b.t() for a, b in zip(A.split(rank), B.split(sizes), strict=True)], dim=1)
    exact = x @ NVFP4.dequantize(packed, (N, columns), torch.float64).double().t() + bias + added
    given |= {"codes": packed["weight_packed"], "scale": packed["weight_scale"]}
    given |= {"divisor": packed["weight_global_scale"], "meeting": counters(DEVICE)}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}, exact


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_product_with_the_dequantized_weight_and_the_adapter(shape: tuple) -> None:
    given, exact = operands(*shape)
    y = linear(**given, sizes=shape[2])
    assert (y.shape, y.dtype) == (exact.shape, torch.bfloat16)
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_no_bias_and_rows_apart() -> None:
    given, exact = operands(*SHAPES[1])
    wide = torch.randn(5, 1104).to(torch.bfloat16).to(DEVICE)
    wide[:, :1024] = given["x"]
    y = linear(**given | {"x": wide[:, :1024], "bias": None}, sizes=SHAPES[1][2])
    exact = exact - given["bias"].cpu().double()
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_rows_come_and_go() -> None:
    """All and few rows of one layer in turns, as completions end: the blocks meet each time."""
    given, exact = operands(*SHAPES[4])
    for rows in (8, 3, 5, 1, 8):
        y = linear(**given | {"x": given["x"][:rows]}, sizes=[32, 16])
        torch.testing.assert_close(y.cpu().double(), exact[:rows], rtol=2**-7, atol=2**-6)
    assert linear(**given | {"x": given["x"][:0]}, sizes=[32, 16]).shape == (0, 48)


def test_the_same_inputs_give_the_same_bits() -> None:
    given, _ = operands(*SHAPES[4])
    first = linear(**given, sizes=SHAPES[4][2])
    assert all(torch.equal(linear(**given, sizes=SHAPES[4][2]), first) for _ in range(3))


def test_every_code_in_every_place_with_every_scale() -> None:
    """x picks one column of W a row: what comes out is a weight."""
    K, N = 1024, 128
    codes, scale, weight = every_code(N, K)
    given, _ = operands(MAX_ROWS, K, [N], 2)
    given |= {"codes": codes.to(DEVICE), "scale": scale.to(DEVICE), "bias": None, "A": torch.zeros_like(given["A"])}
    given["divisor"] = torch.ones(1, device=DEVICE)
    each = torch.arange(MAX_ROWS)
    for first in range(0, K, MAX_ROWS):
        x = torch.zeros(MAX_ROWS, K, dtype=torch.bfloat16, device=DEVICE)
        x[each, first + each] = 1
        y = linear(**given | {"x": x}, sizes=[N])
        assert torch.equal(y.cpu().double(), weight[:, first + each].t())
        if not ON_GPU and first == 120:
            break  # of a slice all lanes had their turn


def test_a_run_is_refused_the_ranks_that_the_kernel_has_not() -> None:
    assert FP4_MAX_RANK == MAX_RANK


def test_what_it_does_not_take_is_refused() -> None:
    given, _ = operands(MAX_ROWS + 1, 1024, [16], 2)
    with pytest.raises(ValueError, match="9 rows"):
        linear(**given, sizes=[16])
    assert fp4_linear.takes([3584, 512, 512], 3584, 32)
    assert not fp4_linear.takes([4864, 4864], 896, 32)  # Qwen2.5-0.5B


@pytest.mark.parametrize(("N", "K"), [(4608, 3584), (37888, 3584), (3584, 18944), (55296, 5120), (5120, 27648)])
def test_a_plan_fits_an_h200(N: int, K: int) -> None:
    how = plan(N, K, H200)
    assert how.blocks <= H200.multiprocessors  # blocks wait for each other: all must be there at once
    assert how.blocks >= 0.95 * H200.multiprocessors
    assert how.shared_bytes <= H200.shared_bytes
    assert how.stages >= 4
    columns = how.warps * 256
    assert how.pieces * columns >= K > (how.pieces - 1) * columns
    assert how.threads <= 608
    assert how.closers >= 1
