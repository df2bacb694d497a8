"""On a GPU too, two warm-ups by one command give the same model."""

import hashlib
from pathlib import Path

import pytest

from processes import run_module

pytestmark = pytest.mark.gpu


def test_two_warm_ups_end_in_the_same_bits(tmp_path: Path) -> None:
    digests = set()
    for out in ("first", "second"):
        words = ("model=pocket", "task=arithmetic", "epochs=0.05", "device=cuda", f"out={out}")
        ran = run_module("qerl_lab.tools.warmup", *words, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        digests.add(hashlib.sha256((tmp_path / out / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
