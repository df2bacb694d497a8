"""Fill MLflow from a run directory after the run, without duplicates."""

import time

from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.spelling import resume_word
from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking.mlflow import MlflowRun, Status, mlflow_uri, prepare_mlflow

ENDED: dict[str, Status] = {"done": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}  # by RunDirectory.status


def resync(directory: RunDirectory, uri: str | None = None) -> str:
    """Fill MLflow from metrics.jsonl and resolved.yaml; return a line describing what was done.

    Sets the status the run ended with; a run still going counts as killed until it ends. Raises ConfigError for a
    damaged record, and MLflow's exceptions if it is down.
    """
    cfg, record = directory.config(), directory.mirror()
    if directory.status == "not run":
        raise ConfigError(
            f"{directory.path} has no metrics.jsonl yet. Type python -m qerl_lab {resume_word(directory.path)}."
        )
    try:
        lines = directory.whole_metrics()
    except ConfigError as error:
        raise ConfigError(f"{directory.path} is damaged, and its mirror stays as it is. {error}") from None
    cfg.tracking.uri = uri or cfg.tracking.uri
    uri = mlflow_uri(cfg, record)
    prepare_mlflow()
    run = MlflowRun(cfg, directory, uri, record)
    points = run.add(lines)
    end = lines[-1]["time"] if lines else time.time()
    files = run.close(record.values["status"] or ENDED[directory.status], directory.artifacts(), end)
    did = f"{uri}: {'created' if run.created else 'found'} run {run.run_id}, added {points} points and "
    return redact(f"{did}{run.params_added} parameters, stored {files} artifacts")
