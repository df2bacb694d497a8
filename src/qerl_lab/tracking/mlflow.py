"""Mirror a run directory to MLflow: add the points, parameters and artifacts that MLflow lacks.

A point is the value of one metric, identified by name, step and time. MLflow cannot delete a point, so a step trained
again after a kill has two points in MLflow; the later point is the one in metrics.jsonl. MLflow cannot change a
parameter either. An extended run has more `steps`, so it gets a new MLflow run, and the MLflow run of the shorter
training stays.
"""

import logging
import os
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

from qerl_lab.config.arm import config_hash, values_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sqlite_file, sqlite_uri
from qerl_lab.config.redact import HIDDEN, url_without_secrets
from qerl_lab.config.rules import check_store
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.record.directory import RunDirectory

if TYPE_CHECKING:
    from mlflow.entities import Run

Status = Literal["FINISHED", "FAILED", "KILLED"]
STATUSES: dict[str, Status] = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}  # by status of a run
STORE_VARIABLE = "MLFLOW_TRACKING_URI"  # MLflow's; it holds the address of a store
PARAM_CHARS, TAG_CHARS, NAME_CHARS = 6000, 5000, 120  # MLflow's limits
KIND, DESCRIPTION = "mlflow.experimentKind", "mlflow.note.content"  # MLflow's tags
RESULT_TABLE = "| result | |\n|---|---|\n"  # first lines of the lab's description of a run
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


def prepare_mlflow() -> None:
    """Set the environment variables in MLFLOW_ENVIRONMENT, except those that the user has set.

    Call it before trl imports MLflow.
    """
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def check_store_variable(cfg: RunConfig) -> None:
    """Raise ConfigError if the variable MLFLOW_TRACKING_URI is used and holds no address. Connects to nothing.

    The variable is not used if `cfg` has a tracking.uri. A folder is not checked, because MLflow's version and settings
    decide whether it is a store.
    """
    given = os.environ.get(STORE_VARIABLE, "")
    if not cfg.tracking.uri and not _is_folder(given) and not given.startswith("file:"):
        check_store(STORE_VARIABLE, given)


def _is_folder(uri: str) -> bool:
    """Tell whether `uri` is the path of a folder and no address, by a missing colon; true of an empty text."""
    return ":" not in uri and uri != "databricks"


def mlflow_uri(cfg: RunConfig, directory: RunDirectory) -> str:
    """Return the URI of the run's MLflow store, with the path of a folder or a sqlite file made absolute.

    It is the first that is set: `tracking.uri` in `cfg`, the variable MLFLOW_TRACKING_URI, `uri` in mlflow.json,
    mlflow.db in the working directory. Raises ConfigError for a URI with *** in place of a password.
    """
    uri = cfg.tracking.uri or os.environ.get(STORE_VARIABLE) or directory.mirror().get("uri")
    uri = uri or "sqlite:///mlflow.db"
    if HIDDEN in uri:
        raise ConfigError(
            f"the run's MLflow store is {uri}, and no record keeps what is hidden there. "
            "Type MLFLOW_TRACKING_URI=URL, the whole of it, in front of the command."
        )
    if _is_folder(uri):
        return Path(uri).absolute().as_uri()
    path = sqlite_file(uri)
    return sqlite_uri(path.absolute()) if path else uri


def params(cfg: RunConfig) -> dict[str, str]:
    """Return the parameters for MLflow: all settings of a run as text, by dotted key.

    Leaves out tracking.uri, resume, dry_run and run_dir, and cuts each value to PARAM_CHARS.
    """
    skip = ("tracking.uri", "resume", "dry_run", "run_dir")
    return {name: str(value)[:PARAM_CHARS] for name, value in values_of(cfg).items() if name not in skip}


def tags(cfg: RunConfig, directory: RunDirectory, key: str) -> dict[str, str]:
    """Return the MLflow tags that identify a run; `key` is the random identifier in its mlflow.json."""
    began = directory.environment()
    values = {
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
    return values | ({"sweep": began["sweep"]} if began.get("sweep") else {})


def run_name(cfg: RunConfig, overrides: Sequence[str]) -> str:
    """Return a run's name in MLflow and W&B: arm, seed, other `overrides` (`key=value`) and 6 digits of `config_hash`.

    Leaves out overrides that do not tell runs of a comparison apart, such as run_dir=. Example: "nvfp4_aqn-seed0
    optim.learning_rate=1e-5 [3fa4b2]".
    """
    apart = ("experiment=", "seed=", "run_dir=", "tracking", "hydra", "sweeps=", "cpu_threads=", "checkpoint.")
    words = " ".join(override for override in overrides if not override.lstrip("+").startswith(apart))
    return f"{' '.join([f'{cfg.experiment}-seed{cfg.seed}', words]).strip()[:NAME_CHARS]} [{config_hash(cfg)[:6]}]"


class MlflowMirror:
    """The MLflow run of a run directory, found or created. Calls may block on the store and raise MLflow's exceptions.

    `created` tells whether the MLflow run is new. `params_added` is the number of parameters that MLflow lacked.
    """

    def __init__(self, cfg: RunConfig, directory: RunDirectory) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"].upper())  # trl may have imported it
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # the tracker prints one line instead
        uri, noted = mlflow_uri(cfg, directory), directory.mirror()
        shown = url_without_secrets(uri)
        directory.note_mirror(uri=shown)  # a resumed run needs it, even if the store is down
        create_sqlite(uri)
        self._directory, self._offset, self._client = directory, 0, MlflowClient(tracking_uri=uri)
        key, mirror = str(directory.mirror()["key"]), None
        if noted.get("experiment_id") and noted.get("uri") == shown:  # it may have another name now
            mirror = self._find(str(noted["experiment_id"]), key, cfg.steps)
        if mirror is None:
            experiment_id = self._experiment_id(cfg.tracking.experiment, uri)
            mirror = self._find(experiment_id, key, cfg.steps)
        self.created = mirror is None
        if mirror is None:
            start = min(_times(directory), default=time.time())
            mirror = self._client.create_run(experiment_id, int(start * 1000), tags(cfg, directory, key))
        self.run_id: str = mirror.info.run_id
        directory.note_mirror(run_id=self.run_id, experiment_id=mirror.info.experiment_id)
        self._client.set_tag(self.run_id, "run_dir", str(directory.path.absolute()))  # it may have moved
        self._client.update_run(self.run_id, status="RUNNING")
        # What MLflow had before: (name, step, unix milliseconds). Later lines of metrics.jsonl hold new points only.
        self._known: set[tuple[str, int, int]] = {
            (name, point.step, point.timestamp)
            for name in mirror.data.metrics for point in self._client.get_metric_history(self.run_id, name)
        }  # fmt: skip
        missing = [Param(name, value) for name, value in params(cfg).items() if name not in mirror.data.params]
        self._client.log_batch(self.run_id, params=missing)  # the others stay: MLflow refuses to change one
        self.params_added = len(missing)

    def _find(self, experiment_id: str, key: str, steps: int) -> "Run | None":
        """Find the MLflow run with the tag run_key=`key` in an experiment; None if there is none.

        An extended run gets a new mirror, so the steps must agree. A mirror without parameters fits too: the run was
        killed while it created its mirror. config_hash is not compared, because a new key in the schema changes it.
        """
        mirrors = self._client.search_runs([experiment_id], f"tags.run_key = '{key}'")
        return next((run for run in mirrors if run.data.params.get("steps", str(steps)) == str(steps)), None)

    def _experiment_id(self, name: str, uri: str) -> str:
        """Return the id of the MLflow experiment `name`; create the experiment if it is missing.

        If `uri` is an sqlite file, the artifacts of a new experiment go to mlruns/ beside that file, instead of
        MLflow's default, a folder in the working directory. Raises ConfigError if the experiment is deleted, because
        MLflow keeps its name.
        """
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            path = sqlite_file(uri)
            location = (path.absolute().parent / "mlruns" / quote(name, safe="")).as_uri() if path else None
            try:
                self._client.create_experiment(name, artifact_location=location)
            except MlflowException:  # another run of the sweep may have created it
                if not self._client.get_experiment_by_name(name):
                    raise
            experiment = self._client.get_experiment_by_name(name)
        if experiment.lifecycle_stage == "deleted":
            store = f"{STORE_VARIABLE}={shlex.quote(url_without_secrets(uri))}"
            raise ConfigError(
                f"MLflow's experiment {name} is deleted. Type {store} python -m mlflow experiments restore "
                f"--experiment-id {experiment.experiment_id}, or for a new run tracking.experiment=NAME."
            )
        if KIND not in experiment.tags:  # decides which page a plain link opens
            self._client.set_experiment_tag(experiment.experiment_id, KIND, "custom_model_development")
        return str(experiment.experiment_id)

    def update(self) -> int:
        """Send the points that metrics.jsonl has and MLflow lacks; return how many were sent."""
        from mlflow.entities import Metric

        lines, offset = self._directory.metrics_from(self._offset)
        points = {
            (name, line["step"], int(line["time"] * 1000)): value
            for line in lines for name, value in line["metrics"].items()
        }  # fmt: skip
        new = {point: value for point, value in points.items() if point not in self._known}
        sent = [Metric(name, value, milliseconds, step) for (name, step, milliseconds), value in new.items()]
        self._client.log_batch(self.run_id, metrics=sent)
        self._offset = offset
        return len(new)

    def close(self, status: Status, result: Mapping[str, Any], end_time: float) -> int:
        """Upload the artifacts, describe the MLflow run by `result` and end it; return the number of artifacts.

        The description is a Markdown table of `result`: a run's headline numbers (the content of DONE), or the reason
        why it failed. A description that a user wrote stays. `end_time` is in Unix seconds.
        """
        artifacts = self._directory.artifacts()
        for path in artifacts:
            self._client.log_artifact(self.run_id, str(path))
        now = self._client.get_run(self.run_id).data.tags  # a user may have described the run while it went on
        if now.get(DESCRIPTION, RESULT_TABLE).startswith(RESULT_TABLE):
            rows = "".join(
                f"| {name.replace('_', ' ')} | {_format_result(value)} |\n" for name, value in result.items()
            )
            if rows:
                self._client.set_tag(self.run_id, DESCRIPTION, (RESULT_TABLE + rows)[:TAG_CHARS])
            elif DESCRIPTION in now:  # the reason of an earlier failure
                self._client.delete_tag(self.run_id, DESCRIPTION)
        self._client.set_terminated(self.run_id, status, int(end_time * 1000))
        return len(artifacts)


def _format_result(value: Any) -> str:
    """Format a headline number, or each number of an interval, to four digits; escape a text for a table."""
    if isinstance(value, list):
        return f"[{', '.join(map(_format_result, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _times(directory: RunDirectory) -> list[float]:
    """Return when the run's sessions started and ended, and the times of its metrics, in Unix seconds."""
    sessions = [moment for session in directory.sessions() for moment in session if moment is not None]
    return sessions + [line["time"] for line in directory.metrics()]


def resync(directory: RunDirectory, uri: str | None = None) -> str:
    """Fill MLflow from the record in a run directory; return a line describing what was added.

    `uri` replaces the run's own store (see `mlflow_uri`). Raises ConfigError if the record is missing, damaged or
    read-only, the run is running, or `uri` is no address of a store; ConnectionError if MLflow fails or cannot be
    reached.
    """
    if uri:
        check_store("uri", uri)
    cfg = directory.config()
    directory.check()
    if directory.status == "not run":
        raise ConfigError(
            f"{directory.path} has no metrics.jsonl yet. Type python -m qerl_lab {resume_override(directory.path)}."
        )
    try:
        directory.checked_metrics()
    except ConfigError as error:
        raise ConfigError(f"{directory.path} is damaged, and its mirror stays as it is. {error}") from None
    cfg.tracking.uri = uri or cfg.tracking.uri
    check_store_variable(cfg)
    prepare_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        with directory.locked():  # else a running run would end in MLflow as KILLED
            result = {"reason": directory.reason} if directory.status == "failed" else directory.result()
            run = MlflowMirror(cfg, directory)
            points = run.update()
            files = run.close(STATUSES[directory.status], result, max(_times(directory), default=time.time()))
    except (MlflowException, OSError) as error:  # OSError: the file of an sqlite store cannot be created
        advice = "Type the command again once the store answers, or add uri=STORE."
        raise ConnectionError(f"not resynced. {str(error).rstrip('.')}. {advice}") from error
    did = f"{directory.mirror()['uri']}: {'created' if run.created else 'found'} run {run.run_id}, added {points}"
    return f"{did} points and {run.params_added} parameters, stored {files} artifacts"


def create_sqlite(uri: str) -> None:
    """Create the sqlite database of `uri` if it is missing; do nothing for another kind of store.

    Creates it under a temporary name, then links it into place. Otherwise a kill, or two runs of a sweep that create
    the database at the same time, would leave a half-created database, which cannot be opened again.
    """
    path = sqlite_file(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".mlflow-") as folder:
        aside = Path(folder, "mlflow.db")
        MlflowClient(tracking_uri=sqlite_uri(aside)).search_experiments()
        with suppress(FileExistsError):  # another run of the sweep created it
            os.link(aside, path)
