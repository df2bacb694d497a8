"""Run CUDA C++ kernels on a CPU, with a fiber per thread (cuda_on_cpu.h), and make inputs for them."""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qerl_lab.formats.e2m1 import MAGNITUDES

HELPERS = Path(__file__).parent


def library(source: Path, folder: Path) -> ctypes.CDLL:
    """Compile a kernel through NAME_on_cpu.cpp into a library. Skips the test without a compiler."""
    if (compiler := shutil.which("c++")) is None:
        pytest.skip("needs a C++ compiler")
    out, name = folder / f"{source.stem}.so", f"{source.stem}_on_cpu.cpp"
    words = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-shared", "-fPIC", f"-I{HELPERS}", f"-I{source.parent}", "-o",
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
