"""`python -m qerl_lab.evaluate` killed at the worst moments, in forked processes (forked.py)."""

import signal
from functools import partial
from pathlib import Path

import pytest

import forked
from qerl_lab.evaluate import __main__ as evaluate

pytestmark = [pytest.mark.integration, pytest.mark.slow]
WORDS = [
    "accuracy", "model=pocket", "benchmarks=arithmetic", "questions=12", "samples=2", "max_completion_tokens=24",
    "batch_size=8", "device=cpu", "common=true", "format=nvfp4", "out=out",
]  # fmt: skip


def command() -> int:
    return evaluate.main(WORDS)


run = partial(forked.run, command)


def test_an_evaluation_that_is_killed_goes_on_and_writes_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    assert run(whole) == 0, (whole / "output.txt").read_text()
    moments = [("note", 2), ("note", 1), ("note", 3), ("finish", 1)]  # a part is written, not noted; or all is written
    for method, call in moments:
        code = run(killed, "qerl_lab.record.out", f"Unfinished.{method}", call)
        assert code == -signal.SIGKILL, (killed / "output.txt").read_text()
        assert not (killed / "out").exists()
    assert run(killed) == 0, (killed / "output.txt").read_text()
    assert (killed / "out" / "eval.parquet").read_bytes() == (whole / "out" / "eval.parquet").read_bytes()
    assert sorted(path.name for path in killed.iterdir()) == ["out", "output.txt"]
