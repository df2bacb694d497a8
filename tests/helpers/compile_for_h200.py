"""Compile the Triton kernels of rollout/vllm, and some of formats, for an H200 without having one; `_unpack` for a T4
and an L4.

Prints a line of JSON per kernel. Run it in a separate process without TRITON_INTERPRET.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qerl_lab.formats.unpack_kernels import _unpack, _unpack_marlin, _unpack_tiles
from qerl_lab.rollout.vllm import adapter_kernels

T4, L4, H200 = (GPUTarget("cuda", capability, 32) for capability in (75, 89, 90))
PARTS = ((0, 0, 3584), (28, 3584, 4096), (32, 4096, 4608))  # q, k and v of Qwen2.5-7B
TYPES = {
    **dict.fromkeys(["x", "A", "B", "y", "bias", "out"], "*bf16"), "sums": "*fp32",
    "codes": "*i32", "scale": "*u8", "factor": "fp32", "alpha": "fp32",
}  # fmt: skip
# Arguments that may not be divisible by 16.
ANY = {"rows", "splits", "split_stride", "lines", "factor", "alpha", "block", "tile", "blocks"}


def compiled(
    kernel: Any, warps: int, stages: int = 3, target: GPUTarget = H200, types: Mapping[str, str] = TYPES,
    **constants: Any,
) -> dict[str, Any]:  # fmt: skip
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in {*ANY, *constants}}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, divisible)
    options = {"num_warps": warps, "num_stages": stages, "launch_pdl": target == H200}
    made = triton.compile(source, target=target, options=options)
    return {
        "kernel": kernel.__name__, "target": target.arch, "shared": made.metadata.shared, "ptx": made.asm["ptx"],
        **constants,
    }  # fmt: skip


def main() -> None:
    made = [compiled(kernel, 4) for kernel in (_unpack_marlin, _unpack_tiles)]
    for target, dtype, (width, e8m0) in itertools.product((T4, L4), ("*fp32", "*bf16"), ((16, False), (32, True))):
        types = TYPES | {"codes": "*u8", "out": dtype}
        made.append(compiled(_unpack, 4, target=target, types=types, WIDTH=width, E8M0=e8m0))
    for rows, columns in ((16, 4608), (64, 4608), (64, 37_888)):
        block_m, block_n, warps = adapter_kernels.blocks_of(rows, columns)
        made.append(
            compiled(
                adapter_kernels._shrink, 4, 4, BLOCK_M=adapter_kernels.SHRINK_M, BLOCK_R=adapter_kernels.BLOCK_R,
                BLOCK_K=adapter_kernels.block_k_of(rows), AHEAD=True,
            )
        )  # fmt: skip
        for biased in ({}, {"bias": None}):
            made.append(
                compiled(
                    adapter_kernels._expand, warps, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_R=32, PARTS=PARTS, RANK=32,
                    AHEAD=True, **biased,
                )
            )  # fmt: skip
    for one in made:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
