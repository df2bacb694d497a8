"""Runs to be killed and one uninterrupted run, a stand-in for a run's process, and an MLflow store without runs."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from killed_runs import SETTINGS, Reference, uninterrupted
from qerl_lab.cli import launch
from qerl_lab.preflight import machine
from qerl_lab.tracking import tracker
from qerl_lab.tracking.mlflow import create_sqlite
from run_directories import write_config
from standin import CHILD


@pytest.fixture(scope="session")
def new_run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes a run directory with resolved.yaml, as the command line leaves it for the child."""

    def make(**changes: object) -> Path:
        run_dir = tmp_path_factory.mktemp("new") / "run"
        run_dir.mkdir()
        write_config(run_dir, tiny(**changes, run_dir=str(run_dir)))
        return run_dir

    return make


@pytest.fixture(scope="session")
def killable(new_run, empty_db: Path) -> Callable[..., Path]:
    """Return a function that makes the directory of a run with SETTINGS, and an MLflow store beside it."""

    def make(**changes: object) -> Path:
        run_dir = new_run(**(SETTINGS | changes))
        shutil.copyfile(empty_db, run_dir.parent / "mlflow.db")
        return run_dir

    return make


@pytest.fixture(scope="session")
def reference(killable) -> Reference:
    return uninterrupted(killable())


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the script that runs start as their process, and return it. The test works in an empty directory."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: [sys.executable, "-S", str(script), str(run_dir)])
    monkeypatch.setattr(machine, "has_gpu", lambda: False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return script


@pytest.fixture(scope="session")
def empty_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create an MLflow database without runs, which tests copy because creating one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_sqlite(f"sqlite:///{path}")
    assert [entry.name for entry in path.parent.iterdir()] == ["mlflow.db"]
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the test's own directory, where MLflow puts artifacts, with short times between flushes and retries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracker, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(tracker, "RETRY_SECONDS", 0.1)
    return tmp_path


@pytest.fixture
def db(empty_db: Path, here: Path) -> str:
    shutil.copy(empty_db, here / "mlflow.db")
    return f"sqlite:///{here}/mlflow.db"


@pytest.fixture
def run_dir(here: Path) -> Path:
    (here / "run").mkdir()
    return here / "run"
