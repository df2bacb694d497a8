"""Run training processes that die at a chosen point, and compare their records with uninterrupted runs.

The children are forked (forked.py) and run the main function of `python -m qerl_lab.train`.
"""

import json
import os
import signal
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import forked
from forked import ended
from mlflow_store import latest, mirrored, recorded, runs
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train import __main__ as child
from repeated import files_of, lines_of

STEPS = 6
SETTINGS = {
    "steps": STEPS, "checkpoint__every": 1, "tracking__mlflow": True, "optim__learning_rate": 0.02,
    "aqn__schedule": "exponential", "aqn__unit": "kl", "aqn__kl_start": 0.02, "aqn__kl_end": 0.002, "aqn__stages": 3,
    "aqn__solver__prompts": 4, "aqn__solver__draws": 2,
    "algorithm__updates_per_rollout": 2, "algorithm__beta": 0.05, "algorithm__entropy_coef": 0.02,
    "algorithm__entropy_target": 5.0,
}  # fmt: skip


def train(run_dir: Path) -> int:
    return child.main(RunDirectory(run_dir), os.getppid())


def start(run_dir: Path, *moment: Any) -> BaseProcess:
    """Start the run's process, which may die at the `Moment` of these words."""
    return forked.start(partial(train, run_dir), run_dir.parent, run_dir / "output.txt", *moment)


def kill(run_dir: Path, *moments: tuple[Any, ...]) -> None:
    """Let the run die at each of the moments in turn, and continue it each time."""
    for moment in moments:
        assert ended(start(run_dir, *moment)) == -signal.SIGKILL, (moment, (run_dir / "output.txt").read_text())
        assert not (run_dir / "DONE").exists(), moment


def finish(run_dir: Path) -> None:
    assert ended(start(run_dir)) == 0, (run_dir / "output.txt").read_text()


@dataclass(frozen=True)
class Reference:
    """Record of an uninterrupted run."""

    lines: list[tuple[int, dict[str, float]]]
    files: list[bytes]


def uninterrupted(run_dir: Path) -> Reference:
    finish(run_dir)
    lines = lines_of(run_dir)
    assert [step for step, _ in lines] == [0, *range(1, STEPS + 1), STEPS]
    found = Reference(lines, files_of(run_dir))
    check_mlflow(run_dir, found)
    return found


def check(run_dir: Path, reference: Reference) -> None:
    """Assert that the record equals the reference's."""
    assert lines_of(run_dir) == reference.lines
    assert files_of(run_dir) == reference.files
    assert json.loads((run_dir / "DONE").read_text())["steps"] == STEPS
    assert not (run_dir / "FAILED").exists()
    assert not list((run_dir / "checkpoints").glob(".step-*"))
    check_mlflow(run_dir, reference)


def check_mlflow(run_dir: Path, reference: Reference) -> None:
    """Assert that MLflow has one finished run, and that its last value of each point equals metrics.jsonl."""
    uri = f"sqlite:///{run_dir.parent}/mlflow.db"
    assert [run.info.status for run in runs(uri)] == ["FINISHED"]
    points = latest(mirrored(uri))
    assert points == latest(recorded(run_dir))
    assert {name for name, _ in points} >= {name for _, metrics in reference.lines for name in metrics}
