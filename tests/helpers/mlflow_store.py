"""Write runs that MLflow mirrors, and read what an MLflow store holds of them."""

from collections import Counter
from pathlib import Path
from typing import Any

from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.tracking.mlflow import prepare_mlflow
from qerl_lab.tracking.tracker import Tracker
from run_directories import write_config

Point = tuple[str, int, float, int]  # metric, step, value, unix milliseconds


def config(run_dir: Path, uri: str | None = None, mlflow: bool = True, **changes: Any) -> RunConfig:
    """Return a run's configuration and write the resolved.yaml of a real run."""
    cfg = RunConfig(**changes)
    cfg.tracking.uri, cfg.tracking.mlflow = uri, mlflow
    write_config(run_dir, cfg)
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


def client(uri: str) -> Any:
    prepare_mlflow()
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def runs(uri: str) -> list[Any]:
    return list(client(uri).search_runs([e.experiment_id for e in client(uri).search_experiments()]))


def points(uri: str, run_id: str) -> list[Point]:
    names = client(uri).get_run(run_id).data.metrics
    return sorted((n, p.step, p.value, p.timestamp) for n in names for p in client(uri).get_metric_history(run_id, n))


def mirrored(uri: str) -> list[Point]:
    """Return the points of the store's only run; empty if there is no run yet."""
    found = runs(uri)
    assert len(found) <= 1
    return points(uri, found[0].info.run_id) if found else []


def latest(points: list[Point]) -> dict[tuple[str, int], float]:
    """Return the last value of each metric and step."""
    return {(name, step): value for name, step, value, _ in sorted(points, key=lambda point: point[3])}


def recorded(run_dir: Path) -> list[Point]:
    lines = RunDirectory(run_dir).metrics()
    return sorted((n, ln["step"], v, int(ln["time"] * 1000)) for ln in lines for n, v in ln["metrics"].items())


def doubles(uri: str, run_id: str) -> list[tuple[str, int]]:
    return [at for at, n in Counter((name, step) for name, step, _, _ in points(uri, run_id)).items() if n > 1]
