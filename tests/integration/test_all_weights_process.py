"""`lora=full` as a user types it: train, resume, evaluate, and start another run from the model."""

import json
from pathlib import Path

import pytest

from processes import run_module
from qerl_lab.record.directory import RunDirectory

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WORDS = (
    "+experiment=bf16", "lora=full", "scale=pocket", "device=cpu", "cpu_threads=1", "tracking=none",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_completion_tokens=16", "eval.questions=8",
    "optim.learning_rate=1e-4", "task.train_questions=64", "seed=3",
)  # fmt: skip


def typed(folder: Path, module: str, *words: str) -> str:
    done = run_module(module, *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_of_all_weights_is_trained_resumed_evaluated_and_used_as_a_model(tmp_path: Path) -> None:
    said = typed(tmp_path, "qerl_lab", *WORDS, "steps=2", "run_dir=run")
    assert "grpo, all weights in float32 (899,552 parameters)" in said
    assert "eval.parquet, model/)" in said
    assert "tools.export" not in said

    run = RunDirectory(tmp_path / "run")
    assert (run.status, run.config().lora.rank) == ("done", 0)
    assert json.loads((run.model / "config.json").read_text())["dtype"] == "bfloat16"
    first = (run.model / "model.safetensors").read_bytes()

    assert "continuing after step 2" in typed(tmp_path, "qerl_lab", "resume=run", "steps=3")
    assert [line["step"] for line in run.metrics()][-2:] == [3, 3]
    assert (run.model / "model.safetensors").read_bytes() != first

    said = typed(tmp_path, "qerl_lab.evaluate", "accuracy", "run=run", "questions=4", "samples=2", "device=cpu")
    assert "run run is evaluated: bf16" in said
    said = typed(tmp_path, "qerl_lab.evaluate", "accuracy", "run", "adapter=false", "questions=4", "device=cpu")
    assert "its base alone" in said
    found = [json.loads(file.read_text()) for file in run.path.glob("evaluations/*/evaluation.json")]
    assert {about["run_seed"] for about in found} == {3}
    identities = [about["identity"] for about in found]
    assert len({identity["adapter"] for identity in identities}) == 2
    assert (
        len({identity["weights"]["hash"] for identity in identities}) == 1
    )  # both name the model that the run began with

    again = [word for word in WORDS if word != "lora=full"]
    typed(tmp_path, "qerl_lab", *again, "lora=rank16", "steps=1", "model.path=run/model", "run_dir=next")
    assert (tmp_path / "next" / "DONE").is_file()
    refused = run_module("qerl_lab.tools.export", "run", "out=out", cwd=tmp_path)
    assert refused.returncode == 2
    assert f"Copy {run.model}" in refused.stderr
