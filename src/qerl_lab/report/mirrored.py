"""Read the runs of an MLflow experiment, from their directories if these exist, else from MLflow.

MLflow has settings, metrics and, if artifacts are reachable, eval.parquet. It lacks the machine, package versions and
the pauses of a resumed run. `Origin.missing` says what is missing.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.record.directory import EVALUATIONS, RunDirectory, is_run
from qerl_lab.record.metrics import check_steps
from qerl_lab.report.arms import FINISHED, Run
from qerl_lab.report.frames import find
from qerl_lab.report.runs import (
    DAMAGE,
    KEPT,
    Origin,
    Record,
    check_phases,
    claims_sha256,
    damage,
    read_record,
    record_of,
)
from qerl_lab.terminal import near


def read_experiment(uri: str, experiment: str) -> tuple[list[Record], dict[str, str]]:
    """Read every run of an experiment: the records, and the damaged runs with the reason, by name.

    Runs of other tools count as damaged. Raises what `frames.find` raises.
    """
    client, ours, foreign = find(uri, experiment)
    records: dict[Any, Record] = {}  # by directory, which an extended run shares with the shorter one, or by MLflow run
    damaged = dict(line.split(": ", 1) for line in foreign)
    for run, mirror in ours.items():
        folder = Path(mirror.data.tags.get("run_dir", ""))
        try:
            if _is_there(folder, mirror.data.tags.get("run_key")):
                records[folder.resolve()] = read_record(RunDirectory(folder), near(folder))
            else:
                records[mirror.info.run_id] = _of_mirror(client, run, mirror)
        except DAMAGE as error:
            damaged[run.name] = damage(error)
    return list(records.values()), damaged


def _is_there(folder: Path, key: str | None) -> bool:
    """Return whether a run's directory still holds that run; a later run may have reused the path."""
    if not (folder.is_absolute() and folder.is_dir() and is_run(os.listdir(folder))):
        return False
    run = RunDirectory(folder)
    return key is None or run.mirror().get("key", key) == key


def _of_mirror(client: Any, run: Run, mirror: Any) -> Record:
    """Build the record of a run whose directory is gone. Raises OSError or ValueError if more of it is missing."""
    tags, where = mirror.data.tags, mirror.data.tags.get("run_dir", "")
    lacks = ["machine", "versions"]
    phases = _answers(client, mirror) if run.status == FINISHED and run.value("eval.questions") != "0" else {}
    if run.status == FINISHED and run.value("eval.questions") != "0" and not phases:
        lacks.append("the answers to each held-out question")
    gone = (f"its directory{f' {where}' if where else ''} is gone; MLflow keeps no {', '.join(lacks)}, and its seconds "
            "are from start to end, with all between two sessions")  # fmt: skip
    origin = Origin(
        command=tags.get("command", ""), commit=tags.get("git_sha", ""), missing=gone,
        began=pd.Timestamp(mirror.info.start_time, unit="ms", tz="UTC").isoformat(timespec="seconds"),
        claims_sha256=claims_sha256(mirror.data.params),
    )  # fmt: skip
    if run.status != FINISHED:
        return Record(run, origin=origin)
    steps = _steps(client, mirror)
    check_steps(dict.fromkeys(steps.index, 1), int(mirror.data.params["steps"]), "MLflow")
    seconds = (mirror.info.end_time - mirror.info.start_time) / 1000
    return record_of(run, steps, phases, seconds, origin)


def _steps(client: Any, mirror: Any) -> pd.DataFrame:
    """Read the metrics of `KEPT` in the layout of `runs.read_steps`."""
    columns = {}
    for name in KEPT:
        if name in mirror.data.metrics:
            points = client.get_metric_history(mirror.info.run_id, name)
            points = sorted(points, key=lambda point: point.timestamp)  # the last one of a step counts: trained again
            columns[name] = {point.step: point.value for point in points}
    return pd.DataFrame(columns).sort_index().rename_axis("step")


def _answers(client: Any, mirror: Any) -> dict[str, pd.DataFrame]:
    """Download the held-out answers by phase from the artifacts; empty if these are out of reach."""
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as folder:
        try:
            client.download_artifacts(mirror.info.run_id, EVALUATIONS, folder)
        except (MlflowException, OSError):  # never stored, or on a disk that this machine does not see
            return {}
        phases = RunDirectory(Path(folder)).evaluations()
    check_phases(phases)
    return phases
