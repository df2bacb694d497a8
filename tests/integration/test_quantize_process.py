"""`python -m qerl_lab.quantize` as a process: on the embedded policy, killed at the worst moments, on a full disk.

Starting Python takes seconds, so processes that will be killed are forked (forked.py).
"""

import json
import re
import resource
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import forked
from processes import run_module
from qerl_lab.quantize import __main__ as quantize
from small_checkpoints import write_dense

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WORDS = ["model=model", "format=nvfp4", "shard_gb=2e-5", "out=out"]
AMID_WEIGHTS = "qerl_lab.quantize.rtn", "output_tensors", 12


@pytest.fixture
def model(tmp_path, monkeypatch) -> Path:
    """Write a small model in several files into the working directory."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=427, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    (tmp_path / "model").mkdir()
    return write_dense(tmp_path / "model", Qwen2ForCausalLM(config).bfloat16(), max_shard_size="30KB")


def files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files by name, except quality.json, which has times."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "quality.json"}


def command() -> int:
    return quantize.main(WORDS)


child = partial(forked.run, command)


@pytest.fixture
def uninterrupted(model) -> dict[str, bytes]:
    assert child(model.parent) == 0
    (model.parent / "out").rename(model.parent / "reference")
    return files(model.parent / "reference")


def test_the_embedded_policy_becomes_a_checkpoint_with_its_quality_beside_it(tmp_path):
    done = run_module("qerl_lab.quantize", "model=pocket", "out=checkpoint", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    report = json.loads((tmp_path / "checkpoint" / "quality.json").read_text())
    assert 20 < report["sqnr_db"]["all"] < 21
    assert 4.5 < report["bits_per_weight"]["quantized"] < 4.51
    assert report["environment"]["packages"]["torch"] == torch.__version__
    assert report["environment"]["command"].endswith("-m qerl_lab.quantize model=pocket out=checkpoint")
    words = shlex.split(done.stdout.splitlines()[-1].split("-m qerl_lab ")[1])
    assert "would run 1 job" in run_module("qerl_lab", *words, "dry_run=true", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "moment",
    [
        AMID_WEIGHTS,
        ("qerl_lab.quantize.quality", "measure_layer", 2),  # the weights are complete
        ("pathlib", "Path.rename", 1),  # all files are complete
    ],
)
def test_after_a_kill_the_same_command_writes_the_same_bytes(model, uninterrupted, moment):
    folder = model.parent
    assert child(folder, *moment) == -signal.SIGKILL
    assert not (folder / "out").exists()
    assert child(folder) == 0, (folder / "output.txt").read_text()
    assert files(folder / "out") == uninterrupted
    assert sorted(path.name for path in folder.iterdir()) == ["model", "out", "output.txt", "reference"]


def test_ctrl_c_ends_the_command_with_one_line_and_leaves_no_files(model):
    folder = model.parent
    assert child(folder, *AMID_WEIGHTS, False, signal.SIGINT) == 130
    assert (folder / "output.txt").read_text().endswith("interrupted\n")
    assert sorted(path.name for path in folder.iterdir()) == ["model", "output.txt"]


def test_a_full_disk_is_reported_with_the_file(model):
    """A limit on file sizes stands for a full disk. The embedding alone exceeds it."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # noqa: E731
    command = [sys.executable, "-m", "qerl_lab.quantize", *WORDS]
    limited = subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit)
    assert limited.returncode == 1
    assert re.fullmatch(
        r"error: \S+/out\.partial/model-\d+-of-\d+\.safetensors cannot be written: .*File too large.*\n",
        limited.stderr,
    )
    assert sorted(path.name for path in model.parent.iterdir()) == ["model"]
