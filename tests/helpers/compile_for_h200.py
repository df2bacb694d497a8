"""Compile the kernels of rollout/vllm for an H200, which Triton does without one. Prints a line of JSON a kernel.

In a process of its own, without TRITON_INTERPRET. `loop` counts the instructions of a kernel's largest loop, by pipe.
"""

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qerl_lab.rollout.vllm import fp4_linear, kernels

H200 = GPUTarget("cuda", 90, 32)
PARTS = ((0, 0, 3584), (28, 3584, 4096), (32, 4096, 4608))  # q, k and v of Qwen2.5-7B
TYPES = {
    **dict.fromkeys(["x", "A", "B", "y", "bias"], "*bf16"), **dict.fromkeys(["sums", "inner", "divisor"], "*fp32"),
    "codes": "*i64", "scale": "*u8",
}  # fmt: skip
INTEGER = {"LOP3", "PRMT", "SHF", "ISETP", "SEL", "LEA", "VIADD", "IADD3"}
# Arguments that are not always divisible by 16.
ANY = {"rows", "splits", "splits_a", "of_adapter", "tiles", "divisor"}


def compiled(kernel: Any, warps: int, stages: int = 3, **constants: Any) -> dict[str, Any]:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
    divisible = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in {*ANY, *constants}}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, divisible)
    made = triton.compile(source, target=H200, options={"num_warps": warps, "num_stages": stages})
    return {
        "kernel": kernel.__name__, "shared": made.metadata.shared, "ptx": made.asm["ptx"],
        "loop": largest_loop(disassembled(made.asm["cubin"])), "threads": 32 * warps, **constants,
    }  # fmt: skip


def disassembled(cubin: bytes) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, file.name], capture_output=True, text=True, check=True).stdout


def largest_loop(sass: str) -> dict[str, int]:
    """Instructions from the label that a branch goes back to, up to the branch: all, and those of the integer pipe."""
    at: dict[str, int] = {}
    names: list[str] = []
    spans = [(0, 0)]
    for line in sass.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            at[label[1]] = len(names)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9]+)(.*)", line):
            names.append(instruction[1])
            target = re.search(r"\.L_x_\d+", instruction[2])
            if instruction[1] == "BRA" and target and target[0] in at:
                spans.append((at[target[0]], len(names)))
    first, end = max(spans, key=lambda span: span[1] - span[0])
    return {"all": end - first, "integer": sum(name in INTEGER for name in names[first:end])}


def main() -> None:
    adapter = {"BLOCK_R": kernels.BLOCK_R, "BLOCK_K": kernels.BLOCK_K}
    columns = {"PARTS": PARTS, "RANK": 32, "BLOCK_R": 32, "BLOCK_N": kernels.BLOCK_N}
    made = []
    for rows in (16, 32, 64):
        made.append(compiled(kernels._shrink, 4, 4, BLOCK_M=rows, **adapter))
        made.append(compiled(kernels._expand, 4, BLOCK_M=rows, **columns))
    for rows, (tile, warps) in fp4_linear._TILES.items():
        blocks = {"BLOCK_M": rows, "BLOCK_N": tile, "BLOCKS": fp4_linear._BLOCKS}
        for whole in (True, False):
            made.append(compiled(fp4_linear._products, warps, 4, **blocks, WHOLE=whole, **adapter))
        made.append(compiled(fp4_linear._finish, 4, BLOCK_M=rows, **columns))
    for one in made:
        print(json.dumps(one))


if __name__ == "__main__":
    main()
