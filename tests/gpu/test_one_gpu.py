"""Of several GPUs a run takes one and says which. Needs a machine with two."""

import json
import os
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


@pytest.mark.parametrize(("visible", "taken", "other"), [(None, "0", "1"), ("1,0", "1", "0")])
def test_the_first_visible_gpu_alone_trains(tmp_path: Path, visible: str | None, taken: str, other: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    command = [sys.executable, "-m", "qerl_lab", *WORDS]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    name = torch.cuda.get_device_name(int(taken))
    assert f"GPU {taken} ({name}) does the run; the other visible " in ran.stdout
    assert f"type CUDA_VISIBLE_DEVICES={other} before the command" in ran.stdout
    assert f", on cuda:0 ({name})" in ran.stdout
    assert len(json.loads((tmp_path / "run" / "env.json").read_text())["gpus"]) == 1
    assert json.loads((tmp_path / "run" / "DONE").read_text())["steps"] == 2
