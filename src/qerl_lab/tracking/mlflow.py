"""Find or create the MLflow run of a run directory, and keep it equal to metrics.jsonl.

MLflow cannot delete a point or change a parameter. If an MLflow run has a point that metrics.jsonl lacks (its step was
trained again after a kill) or an outdated setting (the run was extended), a new run with every point replaces it, and
the old one goes to MLflow's trash. This check runs at the start, after an outage and at the end, so that MLflow never
has more than the record.
"""

import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from qerl_lab.config.arm import config_hash, of_run, values_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sqlite_file, sqlite_uri
from qerl_lab.config.redact import HIDDEN, url_without_secrets
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import MetricsLine
from qerl_lab.record.mirror import MirrorRecord

Status = Literal["FINISHED", "FAILED", "KILLED"]
STATUSES: tuple[Status, ...] = ("FINISHED", "FAILED", "KILLED")
METRICS_PER_BATCH, PARAMS_PER_BATCH, PARAM_CHARS, TAG_CHARS, NAME_CHARS = 1000, 100, 6000, 5000, 120  # MLflow's limits
THREAD = "mlflow-mirror"
# By default MLflow retries a dead server for four minutes and sends telemetry.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
Point = tuple[float | None, int]  # value (None for nan, which never compares equal) and unix milliseconds


def prepare_mlflow() -> None:
    """Set MLflow's environment variables, unless the user has set them. Call it before trl imports MLflow."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def mlflow_uri(cfg: RunConfig, record: MirrorRecord) -> str:
    """Return a run's store: tracking.uri, else MLFLOW_TRACKING_URI, else the last one used, else sqlite here.

    Raises ConfigError if the only known store has a password, which the record does not keep.
    """
    uri = cfg.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or record.values["uri"] or "sqlite:///mlflow.db"
    if HIDDEN in uri:
        if not (uri.startswith("http") and os.environ.get("MLFLOW_TRACKING_USERNAME")):
            raise ConfigError(
                f"the run's MLflow store is {uri}, and no record keeps what is hidden there. "
                "Type MLFLOW_TRACKING_URI=URL, the whole of it, in front of the command."
            )
        uri = uri.replace(f"{HIDDEN}@", "")
    path = sqlite_file(uri)
    return sqlite_uri(path.absolute()) if path else uri


def points_of(lines: Sequence[MetricsLine]) -> dict[tuple[str, int], Point]:
    """Return every point of a record by (name, step). The first of duplicate points counts."""
    points: dict[tuple[str, int], Point] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            points.setdefault((name, line["step"]), _point(value, int(line["time"] * 1000)))
    return points


def _point(value: float, milliseconds: int) -> Point:
    """Make a point; nan becomes None, so that points compare equal."""
    return (value if value == value else None, milliseconds)


def params(cfg: RunConfig) -> dict[str, str]:
    """Return the configuration as dotted names and values, without keys that concern one command or place."""
    skip = ("tracking.uri", "resume", "dry_run", "run_dir")  # resolved.yaml has values longer than PARAM_CHARS
    return {name: str(value)[:PARAM_CHARS] for name, value in values_of(cfg).items() if name not in skip}


def tags(cfg: RunConfig, directory: RunDirectory, key: str) -> dict[str, str]:
    """Return the tags that identify the run; `run_dir` and `command` link MLflow to the record."""
    began = directory.environment()
    found = {
        "mlflow.runName": run_name(cfg, began.get("words") or []),
        "experiment": cfg.experiment,
        "seed": str(cfg.seed),
        "config_hash": config_hash(cfg),
        "scale": cfg.scale,
        "format": cfg.format.name,
        "aqn": cfg.aqn.schedule,
        "git_sha": str(began.get("git_sha", "unknown")),
        "dirty": str(began.get("dirty", "unknown")).lower(),
        "command": str(began.get("command", "unknown"))[:TAG_CHARS],
        "run_key": key,
        "run_dir": str(directory.path.absolute()),
    }
    return found | ({"sweep": began["sweep"]} if began.get("sweep") else {})


def run_name(cfg: RunConfig, words: Sequence[str]) -> str:
    """Return arm, seed, other typed words, and the configuration's hash, which distinguishes runs with equal words."""
    apart = ("experiment=", "seed=", "run_dir=", "tracking", "hydra", "sweeps=", "cpu_threads=", "checkpoint.")
    said = " ".join(word for word in words if not word.lstrip("+").startswith(apart))
    return f"{' '.join([f'{cfg.experiment}-seed{cfg.seed}', said]).strip()[:NAME_CHARS]} [{config_hash(cfg)[:6]}]"


class MlflowRun:
    """The MLflow run that mirrors a run directory. Calls may block on the store and raise MLflow's exceptions.

    `known` holds the (name, step) of the points that the store has.
    """

    def __init__(self, cfg: RunConfig, directory: RunDirectory, uri: str, record: MirrorRecord) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"].upper())  # trl may have imported it
        logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)
        create_sqlite(uri)
        self.client = MlflowClient(tracking_uri=uri)
        self._cfg, self._directory, self._record = cfg, directory, record
        self.experiment_id = self._experiment(cfg.tracking.experiment, uri)
        found = self._sort_out(self._candidates())
        self.run_id: str = found.info.run_id
        record.set(run_id=self.run_id, experiment_id=self.experiment_id, uri=url_without_secrets(uri))
        if found.data.tags.get("run_dir") != (here := str(directory.path.absolute())):
            self.client.set_tag(self.run_id, "run_dir", here)
        self.params_added = self._add_params(params(cfg), found.data.params)

    def _experiment(self, name: str, uri: str) -> str:
        """Return the id of the experiment, created if missing."""
        from mlflow.exceptions import MlflowException

        if found := self.client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self.client.create_experiment(name, artifact_location=artifacts_of(name, uri))
        except MlflowException:  # another run of the sweep created it
            if found := self.client.get_experiment_by_name(name):
                return found.experiment_id
            raise

    def _candidates(self) -> list[Any]:
        """Return the MLflow runs with this directory's key. A copied directory gets a new key, so it has none."""
        key = self._record.values["key"]
        found = list(self.client.search_runs([self.experiment_id], f"tags.run_key = '{key}'"))
        if any(_lives_elsewhere(run.data.tags, self._directory) for run in found):
            self._record.set(key=uuid.uuid4().hex)
            return []
        return found

    def _sort_out(self, candidates: list[Any]) -> Any:
        """Return the candidate that has nothing beyond the record, else a new run; move the others to the trash."""
        held = [self._points(run) for run in candidates]
        lines = self._directory.metrics()  # read after MLflow, so that MLflow cannot have more
        recorded = points_of(lines)
        sound = [
            (run, points)
            for run, points in zip(candidates, held, strict=True)
            if _within(points, recorded) and _is_set_as(self._cfg, run.data.params)
        ]
        self.created = not sound
        run, points = sound[0] if sound else (self._create(candidates, lines), [])
        self.known = {at for at, _ in points}
        for other in candidates:
            if other is not run:
                self.client.delete_run(other.info.run_id)
        return run

    def _points(self, run: Any) -> list[tuple[tuple[str, int], Point]]:
        """Return every point of an MLflow run as ((name, step), point)."""
        names, run_id = run.data.metrics, run.info.run_id
        history = [(name, point) for name in names for point in self.client.get_metric_history(run_id, name)]
        return [((name, point.step), _point(point.value, point.timestamp)) for name, point in history]

    def _create(self, replaced: Sequence[Any], lines: Sequence[MetricsLine]) -> Any:
        """Create a run; copy users' notes (name, description, tags) from the run it replaces."""
        start = lines[0]["time"] if lines else time.time()
        wanted = tags(self._cfg, self._directory, self._record.values["key"])
        if replaced:
            wanted |= _noted(replaced[0].data.tags, wanted["config_hash"])
        return self.client.create_run(self.experiment_id, int(start * 1000), wanted)

    def _add_params(self, wanted: Mapping[str, str], known: Mapping[str, str]) -> int:
        """Send parameters that the run lacks, because MLflow refuses to change one; return how many.

        A parameter that does not define the arm may keep an earlier session's value. For others the run was replaced.
        """
        from mlflow.entities import Param

        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        for i in range(0, len(missing), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=missing[i : i + PARAMS_PER_BATCH])
        return len(missing)

    def add(self, lines: Sequence[MetricsLine]) -> int:
        """Send the points whose (name, step) MLflow lacks; return how many."""
        from mlflow.entities import Metric

        new = {at: point for at, point in points_of(lines).items() if at not in self.known}
        sent = [
            Metric(name, float("nan") if value is None else value, milliseconds, step)
            for (name, step), (value, milliseconds) in new.items()
        ]
        for i in range(0, len(sent), METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=sent[i : i + METRICS_PER_BATCH])
        self.known |= new.keys()
        return len(new)

    def running(self) -> None:
        """Mark a found run as running again."""
        if not self.created:
            self.client.update_run(self.run_id, status="RUNNING")

    def close(self, status: Status, artifacts: Sequence[Path], end_time: float) -> int:
        """Upload the artifacts and end the run; return the number of artifacts."""
        for path in artifacts:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, status, int(end_time * 1000))
        return len(artifacts)


def _within(points: Sequence[tuple[tuple[str, int], Point]], recorded: Mapping[tuple[str, int], Point]) -> bool:
    """Return whether all points are unique and in the record."""
    return len({at for at, _ in points}) == len(points) and all(recorded.get(at) == point for at, point in points)


def _is_set_as(cfg: RunConfig, noted: Mapping[str, str]) -> bool:
    """Return whether no parameter contradicts the run's arm. Missing parameters are added later."""
    now = params(cfg)
    return all(noted.get(name, now[name]) == now[name] for name in of_run(cfg))


def _noted(old: Mapping[str, str], new_hash: str) -> dict[str, str]:
    """Return the tags of a replaced run, with `new_hash` as configuration hash, also at the end of its name."""
    name, old_hash = old.get("mlflow.runName", ""), old.get("config_hash", new_hash)
    if name.endswith(ending := f"[{old_hash[:6]}]"):
        name = f"{name.removesuffix(ending)}[{new_hash[:6]}]"
    return {**old, "mlflow.runName": name, "config_hash": new_hash}


def _lives_elsewhere(noted: Mapping[str, str], directory: RunDirectory) -> bool:
    """Return whether the MLflow run mirrors another existing directory, of which this one is then a copy."""
    where = Path(noted.get("run_dir", ""))
    if not where.is_absolute() or not RunDirectory(where).is_mirrored or where.samefile(directory.path):
        return False
    return RunDirectory(where).mirror().values["key"] == noted["run_key"]


def artifacts_of(experiment: str, uri: str) -> str | None:
    """Return the artifact location of a new experiment: beside an sqlite file, else the store's default (None).

    MLflow's default for sqlite would be a folder in the working directory of the first command.
    """
    path = sqlite_file(uri)
    return None if path is None else (path.absolute().parent / "mlruns" / quote(experiment, safe="")).as_uri()


def create_sqlite(uri: str) -> None:
    """Create a missing database elsewhere and link it into place: a half-created one could not be opened again."""
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        aside = path.with_name(f"{path.name}.{Path(folder).name}")
        MlflowClient(tracking_uri=sqlite_uri(Path(folder, "mlflow.db"))).search_experiments()
        shutil.copyfile(f"{folder}/mlflow.db", aside)
    try:
        os.link(aside, path)
    except FileExistsError:
        pass  # another run of the sweep created it
    finally:
        aside.unlink()


def _is_not_ours(record: logging.LogRecord) -> bool:
    """Filter out urllib3's retry warnings in the mirror thread, which prints one line of its own."""
    return record.threadName != THREAD
