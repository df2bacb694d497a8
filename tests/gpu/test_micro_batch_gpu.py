"""A run beside a process that holds most of the GPU memory chooses a smaller micro-batch, and completes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from processes import run_module
from qerl_lab.config.units import GIB

pytestmark = pytest.mark.gpu

LEFT = 3 * GIB  # for the run; CUDA itself takes about half a GiB of it. 512 completions would take about 4 GiB
WORDS = (
    "+experiment=nvfp4", "scale=pocket", "device=cuda", "steps=2", "optim.micro_batch_size=null",
    "rollout.prompts_per_step=64", "rollout.group_size=8", "rollout.max_completion_tokens=192",
    "rollout.batch_size=128", "eval.questions=0", "tracking=none",
)  # fmt: skip
HOLD = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""

IN_A_PART = """
import torch
from qerl_lab.config.units import GIB
from qerl_lab.model.gpu_memory import limit_to_part, part_bytes
device = torch.device("cuda")
jobs = torch.cuda.mem_get_info(device)[1] // (4 * GIB)
limit_to_part(device, jobs)
part = part_bytes(device, jobs)
torch.empty(part - GIB // 4, dtype=torch.uint8, device=device)
try:
    torch.empty(part + GIB // 4, dtype=torch.uint8, device=device)
except torch.OutOfMemoryError:
    print("refused")
"""


@contextmanager
def mostly_taken() -> Iterator[None]:
    """Let another process hold all GPU memory except `LEFT` during the block."""
    command = [sys.executable, "-c", HOLD, str(LEFT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        try:
            yield
        finally:
            holder.stdin.close()


def chosen(folder: Path, *words: str) -> int:
    """Run all steps; return the micro-batch size that the run chose."""
    ran = run_module("qerl_lab", *WORDS, *words, "run_dir=run", cwd=folder, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done = json.loads((folder / "run" / "DONE").read_text())
    size = json.loads((folder / "run" / "env.json").read_text())["micro_batch_size"]
    print(f"{size} at a time, {done['memory_gpu_peak_gib']:.2f} GiB at most, {done['seconds']:.0f} s")
    assert f"micro-batches of {size}, seed" in ran.stdout
    assert done["steps"] == 2
    return size


def test_a_run_takes_a_smaller_micro_batch_beside_another_process(tmp_path: Path) -> None:
    if torch.cuda.mem_get_info()[0] < 12 * GIB:
        pytest.skip("needs 12 GiB that are free")
    (tmp_path / "alone").mkdir()
    (tmp_path / "beside").mkdir()
    assert chosen(tmp_path / "alone") == 512
    with mostly_taken():
        assert 16 <= chosen(tmp_path / "beside") <= 256


def test_a_job_that_shares_the_gpu_can_allocate_its_part_and_no_more() -> None:
    """The limit stays until its process ends, so the job has a process of its own."""
    if torch.cuda.mem_get_info()[0] < 6 * GIB:
        pytest.skip("needs 6 GiB that are free")
    ran = subprocess.run([sys.executable, "-c", IN_A_PART], capture_output=True, text=True, timeout=300)
    assert ran.stdout == "refused\n", ran.stderr
