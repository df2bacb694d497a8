"""Records of run directories: what is damage, and what is none."""

import os
from pathlib import Path

import pytest

from qerl_lab.report import comparison
from run_directories import make_run


def test_a_step_that_two_processes_recorded_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "runs" / "sound", "bf16", 0)
    run = make_run(tmp_path / "runs" / "mixed", "bf16", 1)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:3], lines[2].replace("0.5", "0.25"), *lines[3:]]))
    assert comparison.read([tmp_path / "runs"]).left_out == [
        "runs/mixed: damaged (metrics.jsonl has 1 steps more than once, the first of them 3)"
    ]


def test_a_run_below_a_name_that_is_no_utf_8_is_not_damaged(tmp_path: Path) -> None:
    (make_run(tmp_path / "runs" / "moved", "bf16", 0)).rename(tmp_path / "runs" / os.fsdecode(b"\xff"))
    assert comparison.read([tmp_path / "runs"]).left_out == []
