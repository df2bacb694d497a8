"""Run training processes that die at a chosen point, and compare their records with uninterrupted runs.

The children are forked (forked.py) and run the main function of `python -m qerl_lab.train`.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forked import SERVER
from mlflow_store import latest, mirrored, recorded, runs
from qerl_lab.record.directory import RunDirectory
from repeated import files_of, lines_of

STEPS = 6
SETTINGS = {
    "steps": STEPS, "checkpoint__every": 1, "tracking__mlflow": True, "optim__learning_rate": 0.02,
    "aqn__schedule": "exponential", "aqn__unit": "kl", "aqn__kl_start": 0.02, "aqn__kl_end": 0.002, "aqn__stages": 3,
    "aqn__solver__prompts": 4, "aqn__solver__draws": 2,
    "algorithm__updates_per_rollout": 2, "algorithm__beta": 0.05, "algorithm__entropy_coef": 0.02,
    "algorithm__entropy_target": 5.0,
}  # fmt: skip


# --- children


def enter(run_dir: Path) -> None:
    """Prepare a forked child: change into the run's parent directory, redirect output to a file."""
    assert "qerl_lab.train.run" in sys.modules, "the server has not imported what a run needs"
    os.chdir(run_dir.parent)
    with (run_dir / "output.txt").open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)


def run_to_the_end(run_dir: Path) -> None:
    enter(run_dir)
    from qerl_lab.train import __main__ as child

    sys.exit(child.main(RunDirectory(run_dir), os.getppid()))


def run_until(run_dir: Path, module: str, function: str, call: int, after: bool) -> None:
    """Die by SIGKILL at the `call`th call of a function, before or after it acts."""
    enter(run_dir)
    import importlib

    from qerl_lab.train import __main__ as child

    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def deadly(*args: Any, **keywords: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **keywords)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)
    sys.exit(child.main(RunDirectory(run_dir), os.getppid()))


def start(target: Callable[..., None], *args: object) -> multiprocessing.Process:
    process = SERVER.Process(target=target, args=args)
    process.start()
    return process


def ended(process: multiprocessing.Process) -> int:
    process.join(300)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def finish(run_dir: Path) -> None:
    assert ended(start(run_to_the_end, run_dir)) == 0, (run_dir / "output.txt").read_text()


# --- runs and their records


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
    """Assert that MLflow has one finished run, and as the last value of each point that of metrics.jsonl."""
    uri = f"sqlite:///{run_dir.parent}/mlflow.db"
    assert [run.info.status for run in runs(uri)] == ["FINISHED"]
    points = latest(mirrored(uri))
    assert points == latest(recorded(run_dir))
    assert {name for name, _ in points} >= {name for _, metrics in reference.lines for name in metrics}
