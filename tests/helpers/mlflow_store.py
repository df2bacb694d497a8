"""Fixtures and readers for the tests of the MLflow mirror, loaded with `pytest_plugins`."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.record.resolved import replace_config
from qerl_lab.tracking import tracker as tracker_module
from qerl_lab.tracking.mlflow import create_sqlite, prepare_mlflow
from qerl_lab.tracking.tracker import Tracker

prepare_mlflow()
from mlflow import MlflowClient  # noqa: E402  (after the settings that it reads)


@pytest.fixture(scope="session")
def empty_db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs, to copy: creating one takes seconds."""
    path = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    create_sqlite(f"sqlite:///{path}")
    assert [entry.name for entry in path.parent.iterdir()] == ["mlflow.db"]
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in its own directory, where MLflow puts artifacts, with short flush and retry intervals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(tracker_module, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(tracker_module, "RETRY_SECONDS", 0.1)
    return tmp_path


@pytest.fixture
def db(empty_db: Path, here: Path) -> str:
    shutil.copy(empty_db, here / "mlflow.db")
    return f"sqlite:///{here}/mlflow.db"


@pytest.fixture
def run_dir(here: Path) -> Path:
    (here / "run").mkdir()
    return here / "run"


def config(run_dir: Path, uri: str | None = None, **changes: Any) -> RunConfig:
    """Return a run's configuration and write the resolved.yaml of a real run."""
    cfg = RunConfig(**changes)
    cfg.tracking.uri = uri
    replace_config(run_dir, cfg)
    return cfg


def log(tracker: Tracker, steps: range, shift: float = 0.0) -> None:
    for step in steps:
        tracker.log(
            step, {name: step + i + shift for i, name in enumerate(declared_metrics()) if not name.startswith("eval/")}
        )


def track(
    run_dir: Path, uri: str | None, logged: range, status: str = "FINISHED", last_step: int = 0, shift: float = 0.0,
    **changes: Any,
) -> Tracker:  # fmt: skip
    """Log these steps as a run does, to its end."""
    tracker = Tracker(config(run_dir, uri, **changes), RunDirectory(run_dir), last_step=last_step)
    log(tracker, logged, shift)
    tracker.finish(status)
    return tracker


def runs(uri: str) -> list[Any]:
    client = MlflowClient(tracking_uri=uri)
    return list(client.search_runs([e.experiment_id for e in client.search_experiments()]))


def points(uri: str, run_id: str) -> list[tuple[str, int, float, int]]:
    client = MlflowClient(tracking_uri=uri)
    names = client.get_run(run_id).data.metrics
    return sorted((n, p.step, p.value, p.timestamp) for n in names for p in client.get_metric_history(run_id, n))


def mirrored(uri: str) -> list[tuple[str, int, float, int]]:
    """Return the points of the store's only run; empty if there is no run yet."""
    found = runs(uri)
    assert len(found) <= 1
    return points(uri, found[0].info.run_id) if found else []


def recorded(run_dir: Path) -> list[tuple[str, int, float, int]]:
    lines = RunDirectory(run_dir).metrics()
    return sorted((n, ln["step"], v, int(ln["time"] * 1000)) for ln in lines for n, v in ln["metrics"].items())


def doubles(uri: str, run_id: str) -> list[tuple[str, int]]:
    return [at for at, n in Counter((name, step) for name, step, _, _ in points(uri, run_id)).items() if n > 1]
