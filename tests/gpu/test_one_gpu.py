"""A run takes one of several GPUs and prints which. A GPU that MPS shares is detected."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu
WORDS = (
    "steps=2", "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_completion_tokens=16",
    "optim.micro_batch_size=4", "task.train_questions=64", "eval.questions=8", "tracking.mlflow=false", "run_dir=run",
)  # fmt: skip


@pytest.mark.parametrize(("visible", "taken"), [(None, "0"), ("1,0", "1")])
def test_the_first_visible_gpu_alone_trains(tmp_path: Path, visible: str | None, taken: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    command = [sys.executable, "-m", "qerl_lab", *WORDS]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    name = torch.cuda.get_device_name(int(taken))
    assert f"The run takes 1 GPU ({name}) of the " in ran.stdout
    assert f"visible ones: CUDA_VISIBLE_DEVICES={taken}. To take others, type it before the command" in ran.stdout
    assert f", on cuda:0 ({name})" in ran.stdout
    assert len(json.loads((tmp_path / "run" / "env.json").read_text())["gpus"]) == 1
    assert json.loads((tmp_path / "run" / "DONE").read_text())["steps"] == 2


@pytest.mark.skipif(shutil.which("nvidia-cuda-mps-control") is None, reason="needs NVIDIA's MPS")
def test_a_gpu_shared_by_mps_is_detected(tmp_path: Path) -> None:
    """Under MPS `fp4_tiles` is not taken, because launches of two processes would wait for each other's blocks."""
    ask = "from qerl_lab.rollout.vllm import fp4_tiles; print(fp4_tiles.shared_by_mps())"
    command = [sys.executable, "-c", f"import torch; torch.zeros(1, device='cuda'); {ask}"]

    def told(environment: dict[str, str]) -> str:
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    daemon = os.environ | {f"CUDA_MPS_{what}_DIRECTORY": str(tmp_path / what.lower()) for what in ("PIPE", "LOG")}
    assert told(dict(os.environ)) == "False"
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env=daemon, check=True)
    try:
        assert told(daemon) == "True"
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", env=daemon, text=True)
