"""Runs that may be killed, and one that was not; a stand-in for a run's process."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from killed_runs import SETTINGS, Reference, create_database, ended, start, uninterrupted
from qerl_lab.cli import launch
from qerl_lab.record.resolved import write_config
from standin import CHILD


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    assert ended(start(create_database, path)) == 0
    return path


@pytest.fixture(scope="session")
def killable(tiny, database: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run directory with its resolved.yaml, as the command line leaves it for the child."""

    def make(**changes: object) -> Path:
        run_dir = tmp_path_factory.mktemp("resume") / "run"
        run_dir.mkdir()
        store = run_dir.parent / "mlflow.db"
        shutil.copyfile(database, store)
        cfg = tiny(**(SETTINGS | {"tracking__uri": f"sqlite:///{store}", "run_dir": str(run_dir)} | changes))
        write_config(run_dir, cfg)
        return run_dir

    return make


@pytest.fixture(scope="session")
def reference(killable) -> Reference:
    return uninterrupted(killable())


@pytest.fixture
def standin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script that runs of this process start in place of their own; the test is in an empty directory."""
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: [sys.executable, "-S", str(script), str(run_dir)])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return script
