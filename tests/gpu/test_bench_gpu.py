"""The benchmark commands on a GPU, at the smallest size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu


def bench(tmp_path: Path, *words: str) -> tuple[dict, str]:
    command = [sys.executable, "-m", "qerl_lab.bench", *words, f"out={tmp_path}/result"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.png").stat().st_size > 10_000
    return json.loads((tmp_path / "result.json").read_text()), done.stdout


def test_linear(tmp_path: Path) -> None:
    result, out = bench(tmp_path, "linear", "models=[qwen2.5-0.5b]", "tokens=[64]")
    assert result["environment"]["gpus"]
    assert len(result["dequantization"]) == 4 * 3
    assert len(result["products"]) == 4 * 5
    assert all(0 < row["ms"] < 5 for row in result["products"])
    assert "whole layer" in out


def test_train_step(tmp_path: Path) -> None:
    result, out = bench(
        tmp_path, "train_step", "model=qwen2.5-0.5b", "sequences=2", "length=128", "steps=1", "arms=[bf16,nvfp4,qlora]"
    )
    rows = {(row["arm"], row["micro_batch_tokens"]): row for row in result["steps"] if row["loss"] == "chunked"}
    assert len(rows) == 6
    assert rows["nvfp4", 256]["base_gb"] < 0.7 * rows["bf16", 256]["base_gb"]
    assert all(row["peak_gb"] > row["base_gb"] for row in result["steps"])
    assert "of QLoRA" in out
