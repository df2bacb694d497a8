"""The kernel `fp4_tiles` against the product with the dequantized NVFP4 weight: on a GPU, or compiled for a CPU.

On a CPU tests/helpers/cuda_on_cpu.h emulates CUDA.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from packed_layers import NVFP4
from qerl_lab.config.rules import TILES_MAX_RANK, fp4_tiles_takes_rank
from qerl_lab.formats import tiles
from qerl_lab.formats.e2m1 import MAGNITUDES
from qerl_lab.formats.tiles import pack
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.fp4_tiles import (
    MAX_ROWS,
    SOURCE,
    DeviceProperties,
    LaunchConfig,
    Shape,
    barrier_counters,
    launch_config,
    linear,
    tile_of,
)

HELPERS = Path(__file__).parents[1] / "helpers"
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SMALL = DeviceProperties(multiprocessors=3, shared_bytes=128 * 2**10)
H200 = DeviceProperties(multiprocessors=132, shared_bytes=227 * 2**10)
# Rows, K, columns of the parts, rank, blocks of a tile. They have every variant, tiles shared by several blocks, one
# and several tiles per block, a partly filled tile, and tiles of one and of several parts.
SHAPES = [(1, 192, [64], 8, 2), (16, 256, [128, 64, 64], 32, 3), (31, 320, [256], 16, 4), (64, 128, [576], 24, 2),
          (64, 576, [128, 64], 32, 2), (57, 128, [832, 192], 16, 4), (50, 192, [64, 128], 64, 3),
          (64, 192, [640], 128, 5), (40, 384, [256], 16, 4), (16, 64, [1024], 8, 8), (24, 1024, [192], 128, 4),
          (9, 1024, [128, 128, 64], 48, 8)]  # fmt: skip


class TensorMap(ctypes.Structure):
    """The struct TensorMap of tests/helpers/cuda_on_cpu.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("numbers", "rows", "columns", "stride", "box_rows", "box_columns")]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Compile the kernel through NAME_on_cpu.cpp into a library. Skip the test without a compiler."""
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("needs a C++ compiler")
    out, name = tmp_path_factory.mktemp("kernel") / f"{SOURCE.stem}.so", f"{SOURCE.stem}_on_cpu.cpp"
    words = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{HELPERS}", f"-I{SOURCE.parent}", "-o",
             out, HELPERS / name]  # fmt: skip
    subprocess.run([compiler, *words], check=True)
    return ctypes.CDLL(str(out))


def pointers(tensors: Sequence[Tensor | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(None if one is None else one.data_ptr() for one in tensors))


def every_code(N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random codes `[N, K/2]`, scales `[N, K/16]` with every E4M3 number >= 0, and the exact weights."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=generator)
    scale = (torch.arange(N * K // 16) % 127).to(torch.uint8).view(N, K // 16).view(torch.float8_e4m3fn)
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(N, K).long()
    signed = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], dtype=torch.float64)
    return codes, scale, signed[nibbles] * scale.double().repeat_interleave(16, dim=1)


@pytest.fixture(autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernel on the CPU as on a small GPU, if there is no GPU."""
    if ON_GPU:
        return
    on_cpu = request.getfixturevalue("on_cpu")

    def launch(config: LaunchConfig, x: Tensor, B: Tensor, tensors: list[Tensor | None], shape: Shape) -> None:
        of_x = TensorMap(x.data_ptr(), *x.shape, shape.stride, config.rows, 2)
        of_B = TensorMap(B.data_ptr(), *B.shape, B.shape[1], 64, 32)
        on_cpu.launch(
            config.rows,
            config.tile,
            config.blocks,
            config.shared_bytes,
            (TensorMap * 2)(of_x, of_B),
            pointers([x, *tensors]),
            ctypes.byref(shape),
        )

    monkeypatch.setattr(fp4_tiles, "_launch_kernel", launch)
    monkeypatch.setattr(fp4_tiles, "device_properties", lambda device: SMALL)


def operands(rows: int, columns: int, sizes: list[int], rank: int, tile: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of `linear` except `sizes`, and the exact result in float64. Summands have magnitude 1."""
    generator = torch.Generator().manual_seed(rows)
    R, N = len(sizes) * rank, sum(sizes)
    packed = NVFP4.quantize(columns**-0.5 * torch.randn(N, columns, generator=generator))
    x, B, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, columns), (N, rank), (N,)))
    A, B = (torch.randn(R, columns, generator=generator) * columns**-0.5).bfloat16(), B * rank**-0.5
    t = x.double() @ A.double().t()
    added = torch.cat([a @ b.double().t() for a, b in zip(t.split(rank, 1), B.split(sizes), strict=True)], dim=1)
    exact = x.double() @ NVFP4.dequantize(packed, (N, columns), torch.float64).double().t() + bias.double() + added
    given = {
        "x": x,
        "packed": pack(packed["weight_packed"], packed["weight_scale"], tile),
        "A": A,
        "B": B,
        "bias": bias,
    }
    given |= {"global_scale": packed["weight_global_scale"], "counters": barrier_counters(N, DEVICE)}
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}, exact


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_multiplies_by_the_dequantized_weight_and_adds_the_adapter(shape: tuple) -> None:
    given, exact = operands(*shape)
    y = linear(**given, sizes=shape[2])
    assert (y.shape, y.dtype) == (exact.shape, torch.bfloat16)
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_linear_takes_no_bias_and_strided_rows() -> None:
    given, exact = operands(*SHAPES[1])
    wide = torch.randn(16, 264).bfloat16().to(DEVICE)
    wide[:, :256] = given["x"]
    y = linear(**given | {"x": wide[:, :256], "bias": None}, sizes=SHAPES[1][2])
    exact = exact - given["bias"].cpu().double()
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_the_number_of_rows_may_change_between_launches() -> None:
    """One layer takes many and few rows in turn, as when completions end. Its blocks meet correctly each time."""
    given, exact = operands(*SHAPES[4])
    for rows in (64, 17, 33, 1, 64):
        y = linear(**given | {"x": given["x"][:rows]}, sizes=[128, 64])
        torch.testing.assert_close(y.cpu().double(), exact[:rows], rtol=2**-7, atol=2**-6)
    assert linear(**given | {"x": given["x"][:0]}, sizes=[128, 64]).shape == (0, 192)


def test_the_same_inputs_give_the_same_bits() -> None:
    given, _ = operands(*SHAPES[4])
    first = linear(**given, sizes=SHAPES[4][2])
    assert all(torch.equal(linear(**given, sizes=SHAPES[4][2]), first) for _ in range(3))


@pytest.mark.parametrize("tile", [2, 3, 4, 5])
def test_every_code_in_every_place_with_every_scale(tile: int) -> None:
    """Each row of x picks one column of W, so each output is one weight."""
    K, N = 128, 256
    codes, scale, weight = every_code(N, K)
    given, _ = operands(64, K, [N], 8, tile)
    given |= {"packed": pack(codes, scale, tile).to(DEVICE), "bias": None, "A": torch.zeros_like(given["A"])}
    given["global_scale"] = torch.ones(1, device=DEVICE)
    for rows in torch.eye(K, dtype=torch.bfloat16, device=DEVICE).split(64):
        y = linear(**given | {"x": rows}, sizes=[N])
        assert torch.equal(y.cpu().double(), rows.cpu().double() @ weight.t())


@pytest.mark.parametrize("rows", [MAX_ROWS + 1, 2 * MAX_ROWS + 17])
def test_more_rows_take_several_launches(rows: int) -> None:
    given, exact = operands(rows, 128, [128, 64], 8, 2)
    y = linear(**given, sizes=[128, 64])
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_unsupported_shapes_are_refused() -> None:
    given, _ = operands(3, 64, [64], 8, 2)
    with pytest.raises(ValueError, match=r"parts \[72\] x 64, rank 8; allowed: up to 3 parts"):
        linear(**given, sizes=[72])
    assert fp4_tiles.supports([3584, 512, 512], 3584, 32)
    assert fp4_tiles.supports([4864, 4864], 896, 32)  # Qwen2.5-0.5B
    assert not fp4_tiles.supports([72, 64], 128, 32)


def test_the_rule_for_runs_allows_the_ranks_that_the_kernel_has() -> None:
    ranks = [rank for rank in range(1, 300) if fp4_tiles.supports([64], 128, rank)]
    assert ranks == [rank for rank in range(1, 300) if fp4_tiles_takes_rank(rank)]


def test_the_kernel_and_its_launch_have_the_same_constants() -> None:
    told = dict(re.findall(r"\b([A-Z_]+) = (\d+)\b", SOURCE.read_text()))
    kernel = [int(told[name]) for name in ("BLOCK", "DEPTH", "AT_A_TIME", "BLOCK_BYTES", "RANKS", "MAX_RANK", "MAKERS")]
    own = [tiles.BLOCK, tiles.DEPTH, tiles.AT_A_TIME, tiles.BLOCK_BYTES, fp4_tiles._RANKS, TILES_MAX_RANK]
    assert kernel == [*own, 32 * fp4_tiles._MAKERS]


def test_a_gpu_with_memory_for_a_single_stage_is_refused() -> None:
    """A stage is freed during the next one, so a single stage would never be freed."""
    with pytest.raises(ValueError, match="two stages of 62464 bytes"):
        launch_config(64, (1, 8, 2, 10, 2304), 1, 32, DeviceProperties(132, 128 * 2**10))


@pytest.mark.parametrize("rows", fp4_tiles.VARIANTS)
@pytest.mark.parametrize("rank", [32, 128])
@pytest.mark.parametrize(
    ("N", "K", "parts", "tile"),
    [(4608, 3584, 3, 2), (3584, 3584, 1, 2), (37888, 3584, 2, 5), (3584, 18944, 1, 4), (55296, 5120, 2, 7),
     (5120, 27648, 1, 5)],
)  # fmt: skip
def test_a_launch_fits_an_h200(rows: int, rank: int, N: int, K: int, parts: int, tile: int) -> None:
    assert tile_of(N, K, 132) == tile
    config = launch_config(rows, (-(-N // 64 // tile), K // 128, 2, tile, 2304), parts, rank, H200)
    # The blocks of a tile wait for each other, so all must be resident.
    assert 0.8 * H200.multiprocessors <= config.blocks <= H200.multiprocessors
    assert config.shared_bytes <= H200.shared_bytes
    assert config.stages >= 3
    assert (config.splits - 1) * config.of_split < K <= config.splits * config.of_split
