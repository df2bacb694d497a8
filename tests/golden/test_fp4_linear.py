"""The NVFP4 product for few rows against the dequantized weight: on a GPU, and in Triton's interpreter on a CPU.

The interpreter runs no assembly. That of the kernel is read and run here, so that it is tested without a GPU too.
"""

import os
import re

import pytest
import torch
from torch import Tensor

from packed_layers import NVFP4

pytest.importorskip("triton")

from qerl_lab.config.rules import FP4_LINEAR_MAX_RANK
from qerl_lab.rollout.vllm.fp4_linear import MAX_ROWS, linear, unpack_assembly
from qerl_lab.rollout.vllm.kernels import MAX_RANK

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
# Rows, K, columns of the parts, rank: tiles that are full, cut and single, one piece of K and several.
SHAPES = [(1, 16, [17], 1), (5, 320, [160, 40, 40], 7), (8, 2048, [128], 16), (16, 1024, [257, 130], 16),
          (17, 896, [64, 64], 32), (32, 4096, [64], 64)]  # fmt: skip


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
    exact = x @ NVFP4.dequantize(packed, (N, columns), torch.float64).t() + bias + added
    given |= {"codes": packed["weight_packed"], "scale": packed["weight_scale"]}
    given["divisor"] = packed["weight_global_scale"]
    return {name: tensor.to(DEVICE) for name, tensor in given.items()}, exact


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_product_with_the_dequantized_weight_and_the_adapter(shape: tuple) -> None:
    given, exact = operands(*shape)
    y = linear(**given, sizes=shape[2])
    assert (y.shape, y.dtype) == (exact.shape, torch.bfloat16)
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_no_bias_and_rows_apart() -> None:
    given, exact = operands(5, 320, [160, 40, 40], 7)
    wide = torch.randn(5, 400).to(torch.bfloat16).to(DEVICE)
    wide[:, :320] = given["x"]
    y = linear(**given | {"x": wide[:, :320], "bias": None}, sizes=[160, 40, 40])
    exact = exact - given["bias"].cpu().double()
    torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-7, atol=2**-6)


def test_the_same_inputs_give_the_same_bits() -> None:
    given, _ = operands(*SHAPES[2])
    assert torch.equal(linear(**given, sizes=[128]), linear(**given, sizes=[128]))


def test_a_run_is_refused_the_ranks_that_the_kernel_has_not() -> None:
    assert FP4_LINEAR_MAX_RANK == MAX_RANK


def test_more_rows_are_refused() -> None:
    given, _ = operands(MAX_ROWS + 1, 16, [17], 1)
    with pytest.raises(ValueError, match=r"33 rows, rank 1; allowed: up to 32 rows, rank 128"):
        linear(**given, sizes=[17])


def test_the_assembly_unpacks_every_code_in_every_place_with_every_scale() -> None:
    """$16 and $17 hold all 16 codes each, in some order; the scales are E4M3 numbers times 2**119."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    generator = torch.Generator().manual_seed(0)
    for first, second in zip(scales, scales.flip(0), strict=True):
        codes = torch.stack([torch.randperm(16, generator=generator) for _ in range(2)])
        words = [sum(code << 4 * j for j, code in enumerate(block)) for block in codes.tolist()]
        pair = torch.stack([first, second])
        found = torch.stack(run(unpack_assembly(), words, (pair * 2.0**119).to(torch.bfloat16)))  # [16, 2]
        assert torch.equal(found.double(), values[codes].T * pair * 2.0**-7)


def run(assembly: str, words: list[int], scales: Tensor) -> list[Tensor]:
    """The 16 results as pairs of bfloat16, of the instructions that the kernel uses and no others."""
    registers: dict[str, int] = {"$16": words[0], "$17": words[1]}
    registers["$18"] = int.from_bytes(scales.view(torch.uint8).numpy().tobytes(), "little")
    found: dict[str, Tensor] = {}

    def operand(text: str) -> int:
        return registers[text] if text in registers else int(text, 0)

    for line in assembly.strip("{}\n").splitlines():
        instruction, *names = re.findall(r"[\w.$]+", line)
        if instruction == ".reg":
            continue
        if instruction == "mov.b64":
            word = operand(names[2])
            registers[names[0]], registers[names[1]] = word & 0xFFFFFFFF, word >> 32
            continue
        values = [operand(name) for name in names[1:]]
        if instruction == "mul.rn.bf16x2":
            found[names[0]] = as_pair(values[0]) * as_pair(values[1])
        elif instruction == "prmt.b32":
            both = (values[0] | values[1] << 32).to_bytes(8, "little")
            registers[names[0]] = int.from_bytes(bytes(both[values[2] >> 4 * i & 7] for i in range(4)), "little")
        else:
            registers[names[0]] = BITWISE[instruction](*values) & 0xFFFFFFFF
    return [found[f"${j}"] for j in range(16)]


BITWISE = {
    "and.b32": int.__and__, "or.b32": int.__or__, "shl.b32": int.__lshift__, "shr.b32": int.__rshift__,
}  # fmt: skip


def as_pair(register: int) -> Tensor:
    return torch.tensor([register & 0xFFFF, register >> 16], dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
