"""Passwords and tokens never reach the files of a run, its MLflow store or the screen, however the run ends."""

import subprocess
from pathlib import Path

import pytest
import yaml

from processes import run_module

pytestmark = pytest.mark.integration

SECRETS = ("pa55word", "t0ken-of-the-hub", "t0ken-of-the-store")
SMALL = [
    "steps=2", "device=cpu", "rollout.prompts_per_step=4", "rollout.group_size=4", "optim.micro_batch_size=4",
    "lora.rank=4", "rollout.max_completion_tokens=16", "task.train_questions=64", "eval.questions=0",
    "checkpoint.every=1", "run_dir=run",
]  # fmt: skip


def lab(here: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    secret = {"HF_TOKEN": SECRETS[1], "MLFLOW_TRACKING_TOKEN": SECRETS[2]}
    return run_module(*words, cwd=here, **secret | variables)


def find_secrets(here: Path, *texts: str) -> list[str]:
    found = [text for text in texts if any(secret in text for secret in SECRETS)]
    files = [path for path in here.rglob("*") if path.is_file()]
    assert files
    return found + [str(path) for path in files if any(secret.encode() in path.read_bytes() for secret in SECRETS)]


def test_passwords_and_tokens_of_the_environment_are_neither_written_nor_printed(tmp_path: Path) -> None:
    """The server is away. The run ends, fails when continued without the password, and `resync` fails later."""
    uri = "http://me:pa55word@127.0.0.1:1/x"
    environment = {"MLFLOW_TRACKING_URI": uri, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    run = lab(tmp_path, "qerl_lab", "+experiment=nvfp4", *SMALL, **environment)
    assert run.returncode == 0, run.stderr
    assert "MLflow at http://***@127.0.0.1:1/x failed" in run.stderr
    assert "MLflow at http://***@127.0.0.1:1/x lacks" in run.stdout
    assert "http://***@127.0.0.1:1/x" in (tmp_path / "run" / "mlflow.json").read_text()
    (tmp_path / "run" / "DONE").unlink()
    for name in ("step-000001", "step-000002"):
        (tmp_path / "run" / "checkpoints" / name / "manifest.json").unlink()
    (tmp_path / "run" / "curves.png").unlink()
    (tmp_path / "run" / "curves.png").mkdir()
    again = lab(tmp_path, "qerl_lab", "resume=run")
    assert again.returncode == 1
    assert "Type MLFLOW_TRACKING_URI=URL" in again.stderr
    later = lab(tmp_path, "qerl_lab.tracking", "resync", "run", **environment)
    assert later.returncode == 1
    assert find_secrets(tmp_path, *(text for ran in (run, again, later) for text in (ran.stdout, ran.stderr))) == []
    assert yaml.safe_load((tmp_path / "run" / "resolved.yaml").read_text())["tracking"]["uri"] is None
