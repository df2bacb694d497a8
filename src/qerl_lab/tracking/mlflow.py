"""One run in one MLflow store: found or created, and equal to the run's metrics.jsonl.

MLflow cannot take back a point or a parameter. A run with a point that metrics.jsonl lacks (its step was trained again
after a kill), or with a setting that is another now (the run got more steps), is therefore replaced: a new one gets
every point, and the old one goes to MLflow's trash. So every opening of a run, at the start, after an outage and at the
end, leaves MLflow with nothing but what the record holds.
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
# MLflow's own defaults retry a dead server for four minutes, and report to its maker.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
Point = tuple[float | None, int]  # value (None is nan, which equals nothing) and unix milliseconds


def prepare_mlflow() -> None:
    """Settings that MLflow reads from the environment; the user's own stay. Best before trl, which imports MLflow."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def mlflow_uri(cfg: RunConfig, record: MirrorRecord) -> str:
    """A run's store: tracking.uri, else MLFLOW_TRACKING_URI, else where it was first mirrored, else sqlite here.

    Raises ConfigError where only a store is known whose password the record does not keep.
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
    """Every point of a record by (name, step). Of two values for one point the first counts."""
    points: dict[tuple[str, int], Point] = {}
    for line in lines:
        for name, value in line["metrics"].items():
            points.setdefault((name, line["step"]), _point(value, int(line["time"] * 1000)))
    return points


def _point(value: float, milliseconds: int) -> Point:
    return (value if value == value else None, milliseconds)


def params(cfg: RunConfig) -> dict[str, str]:
    """Dotted names and values of the configuration, without what concerns one command or one place."""
    skip = ("tracking.uri", "resume", "dry_run", "run_dir")  # long values are whole in resolved.yaml
    return {name: str(value)[:PARAM_CHARS] for name, value in values_of(cfg).items() if name not in skip}


def tags(cfg: RunConfig, directory: RunDirectory, key: str) -> dict[str, str]:
    """Tags that tell the run from others; `run_dir` and `command` lead from MLflow to the record."""
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
    """Arm and seed, what was typed beside them, and the configuration's hash, which differs where no word does."""
    apart = ("experiment=", "seed=", "run_dir=", "tracking", "hydra", "sweeps=", "cpu_threads=", "checkpoint.")
    said = " ".join(word for word in words if not word.lstrip("+").startswith(apart))
    return f"{' '.join([f'{cfg.experiment}-seed{cfg.seed}', said]).strip()[:NAME_CHARS]} [{config_hash(cfg)[:6]}]"


class MlflowRun:
    """The run that mirrors a run directory. Every call may wait on the store and raise what MLflow raises.

    `known` has the (name, step) of the points that the store is known to have.
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
        from mlflow.exceptions import MlflowException

        if found := self.client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self.client.create_experiment(name, artifact_location=artifacts_of(name, uri))
        except MlflowException:  # another run of the sweep was faster
            if found := self.client.get_experiment_by_name(name):
                return found.experiment_id
            raise

    def _candidates(self) -> list[Any]:
        """The runs that carry this directory's key. A copy of a directory gets a key, and so a run, of its own."""
        key = self._record.values["key"]
        found = list(self.client.search_runs([self.experiment_id], f"tags.run_key = '{key}'"))
        if any(_lives_elsewhere(run.data.tags, self._directory) for run in found):
            self._record.set(key=uuid.uuid4().hex)
            return []
        return found

    def _sort_out(self, candidates: list[Any]) -> Any:
        """The candidate that holds nothing but the record, else a new run; the others go to MLflow's trash."""
        held = [self._points(run) for run in candidates]
        lines = self._directory.metrics()  # after MLflow, which thus can only hold less
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
        names, run_id = run.data.metrics, run.info.run_id
        history = [(name, point) for name in names for point in self.client.get_metric_history(run_id, name)]
        return [((name, point.step), _point(point.value, point.timestamp)) for name, point in history]

    def _create(self, replaced: Sequence[Any], lines: Sequence[MetricsLine]) -> Any:
        """A new run, with what users noted on the one that it replaces (name, description, tags)."""
        start = lines[0]["time"] if lines else time.time()
        wanted = tags(self._cfg, self._directory, self._record.values["key"])
        if replaced:
            wanted |= _noted(replaced[0].data.tags, wanted["config_hash"])
        return self.client.create_run(self.experiment_id, int(start * 1000), wanted)

    def _add_params(self, wanted: Mapping[str, str], known: Mapping[str, str]) -> int:
        """MLflow refuses to change a parameter, so a run found again only gets those it lacks.

        One that makes no arm may thus be that of an earlier session; of any other the run would have been replaced.
        """
        from mlflow.entities import Param

        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        for i in range(0, len(missing), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=missing[i : i + PARAMS_PER_BATCH])
        return len(missing)

    def add(self, lines: Sequence[MetricsLine]) -> int:
        """Send the points whose (name, step) MLflow does not have; returns how many."""
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
        """Say that a run found again goes on."""
        if not self.created:
            self.client.update_run(self.run_id, status="RUNNING")

    def close(self, status: Status, artifacts: Sequence[Path], end_time: float) -> int:
        """Store the artifacts and end the run; returns how many artifacts."""
        for path in artifacts:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, status, int(end_time * 1000))
        return len(artifacts)


def _within(points: Sequence[tuple[tuple[str, int], Point]], recorded: Mapping[tuple[str, int], Point]) -> bool:
    return len({at for at, _ in points}) == len(points) and all(recorded.get(at) == point for at, point in points)


def _is_set_as(cfg: RunConfig, noted: Mapping[str, str]) -> bool:
    """Tell whether no parameter of the run contradicts the run's arm; one that it lacks is added later."""
    now = params(cfg)
    return all(noted.get(name, now[name]) == now[name] for name in of_run(cfg))


def _noted(old: Mapping[str, str], new_hash: str) -> dict[str, str]:
    """The tags of a run that is replaced; the hash of its configuration is `new_hash` there and at its name's end."""
    name, old_hash = old.get("mlflow.runName", ""), old.get("config_hash", new_hash)
    if name.endswith(ending := f"[{old_hash[:6]}]"):
        name = f"{name.removesuffix(ending)}[{new_hash[:6]}]"
    return {**old, "mlflow.runName": name, "config_hash": new_hash}


def _lives_elsewhere(noted: Mapping[str, str], directory: RunDirectory) -> bool:
    """Tell whether the run mirrors another directory that is still there, of which this one must then be a copy."""
    where = Path(noted.get("run_dir", ""))
    if not where.is_absolute() or not RunDirectory(where).is_mirrored or where.samefile(directory.path):
        return False
    return RunDirectory(where).mirror().values["key"] == noted["run_key"]


def artifacts_of(experiment: str, uri: str) -> str | None:
    """Where a new experiment's files go: beside a database that is a file, else where the store says (None).

    MLflow's own choice is a folder in whatever directory the first command was typed in.
    """
    path = sqlite_file(uri)
    return None if path is None else (path.absolute().parent / "mlruns" / quote(experiment, safe="")).as_uri()


def create_sqlite(uri: str) -> None:
    """Create a missing database aside and link it into place: one killed while MLflow creates it never opens again."""
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
        pass  # another run of the sweep was faster
    finally:
        aside.unlink()


def _is_not_ours(record: logging.LogRecord) -> bool:
    """urllib3 warns of each retry; of the mirror's, one line of ours is enough."""
    return record.threadName != THREAD
