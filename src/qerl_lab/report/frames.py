"""Find results folders and MLflow stores, and list the runs of an MLflow experiment."""

import os
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sqlite_file, sqlite_uri
from qerl_lab.config.redact import url_without_secrets
from qerl_lab.report.arms import FINISHED, Run, run_from, version
from qerl_lab.tracking.mlflow import client_of, prepare_mlflow

FILL = (
    "Fill one with, for example, python -m qerl_lab +sweeps=weight_formats seed=0, in the folder above notebooks/; "
    "or set MLFLOW_TRACKING_URI to a store that you have."
)


def find_store() -> str:
    """Return MLFLOW_TRACKING_URI, else the mlflow.db here or in the folder above. Raises ConfigError without either."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    here = Path.cwd()
    for folder in (here, here.parent):
        if (folder / "mlflow.db").is_file():
            return sqlite_uri(folder / "mlflow.db")
    raise ConfigError(f"there is no MLflow store: no mlflow.db in {here} or above it. {FILL}")


def find_folder(path: str) -> Path:
    """Find a folder of results or of runs, here or in the folder above. Raises ConfigError if there is none."""
    given = Path(path).expanduser()
    for folder in (given, Path.cwd().parent / given):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{path} is no directory, here or in the folder above {Path.cwd()}. Type another in RESULTS.")


def find(uri: str, experiment: str) -> tuple[Any, dict[Run, Any], list[str]]:
    """Open a store and return its client, the lab's runs of an experiment, and a line on each other run.

    Creates nothing. Raises ConfigError for a missing store or experiment, and for an unreadable store.
    """
    _require_file(uri)
    prepare_mlflow()
    from mlflow.exceptions import MlflowException

    store = url_without_secrets(uri)
    try:
        client = client_of(uri)
        found = client.get_experiment_by_name(experiment)
        names = [] if found else sorted(known.name for known in client.search_experiments())
        runs = client.search_runs([found.experiment_id], max_results=10_000) if found else []
    except MlflowException as error:  # a server that is down, a folder of files, no database
        raise ConfigError(
            f"MLflow at {store} cannot be read ({str(error).partition('. ')[0]}). Start it, or type another address, "
            "for example sqlite:///mlflow.db."
        ) from None
    if found is None:
        raise ConfigError(
            f"MLflow at {store} has no experiment {experiment!r}; it has: {', '.join(names)}. Type one of them."
        )
    return client, *_runs(runs)


def _require_file(uri: str) -> None:
    """Raise ConfigError for a missing database, since MLflow's client would create it."""
    path = sqlite_file(uri)
    if path and not path.is_file():
        raise ConfigError(f"there is no MLflow store at {uri}. Type another. {FILL}")


def _runs(found: list[Any]) -> tuple[dict[Run, Any], list[str]]:
    """Split MLflow's runs into the lab's own and a line on each other one: any tool may write to an experiment."""
    ours, left_out = {}, []
    for run in found:
        name = f"{run.info.run_name or 'unnamed'} ({run.info.run_id[:8]})"
        try:
            ours[_run(name, run)] = run
        except ValueError as error:
            left_out.append(f"{name}: no run of this lab ({error})")
    return ours, left_out


def _run(name: str, run: Any) -> Run:
    tags, info = run.data.tags, run.info
    status = FINISHED if info.status == "FINISHED" else info.status.lower()
    return run_from(
        run.data.params, name=name, status=status, ended=(info.end_time or info.start_time) / 1000,
        code=version(tags.get("git_sha"), tags.get("dirty")), metrics=run.data.metrics,
    )  # fmt: skip
