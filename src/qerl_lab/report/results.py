"""Store the records of a report as tidy Parquet, small enough to commit: `write` the files, `read` the records.

runs.parquet       a row per run found: arm, seed, state, origin, a column per setting that differs, the other settings
                   as JSON in `settings`; only name and state for a damaged run
steps.parquet      a row per run and step: `run`, `step`, and the metrics of `runs.KEPT` as float32
questions.parquet  a row per run, phase ("before", "after") and held-out question: its accuracy over the samples

Steps and questions cover the runs that count. A report on these files equals one on the run directories.
"""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_word
from qerl_lab.report.arms import FINISHED, RENAMED, Run, differing, normalize
from qerl_lab.report.runs import NO_STEPS, Origin, Record, check_phases, record_of
from qerl_lab.system.disk import replace_file

RUNS, STEPS, QUESTIONS = "runs.parquet", "steps.parquet", "questions.parquet"
ORIGIN = tuple(field.name for field in fields(Origin))


@dataclass(frozen=True)
class Frames:
    """The three tables as stored in the files."""

    runs: pd.DataFrame
    steps: pd.DataFrame
    questions: pd.DataFrame


def find_folder(path: str) -> Path:
    """Find a folder of results or of runs, here or in the folder above. Raises ConfigError if there is none."""
    given = Path(path).expanduser()
    for folder in (given, Path.cwd().parent / given):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{path} is no directory, here or in the folder above {Path.cwd()}. Type another in RESULTS.")


def is_results(folder: Path) -> bool:
    """Return whether a folder has the files of `write`."""
    return (folder / RUNS).is_file()


def frames(records: Sequence[Record], damaged: Mapping[str, str], arm_of: Mapping[str, str]) -> Frames:
    """Build the three tables; `arm_of` maps the name of each run that counts to its arm's label."""
    keys = differing([record.run for record in records])
    rows = [_run_row(record, arm_of.get(record.run.name), keys) for record in records]
    rows += [{"run": name, "experiment": None, "state": why} for name, why in damaged.items()]
    counted = [record for record in records if record.run.name in arm_of]
    steps = [record.steps.reset_index().assign(run=record.run.name) for record in counted]
    asked = [
        pd.DataFrame({"run": record.run.name, "phase": phase, "id": values.index, "accuracy": values.to_numpy(float)})
        for record in counted for phase, values in record.accuracy.items() if phase != "gain"
    ]  # fmt: skip
    columns = ["run", "phase", "id", "accuracy"]
    return Frames(
        pd.DataFrame(rows),
        pd.concat(steps, ignore_index=True) if steps else NO_STEPS.reset_index().assign(run=""),
        pd.concat(asked, ignore_index=True) if asked else pd.DataFrame(columns=columns),
    )


def _run_row(record: Record, arm: str | None, keys: Sequence[str]) -> dict[str, Any]:
    run, origin = record.run, record.origin
    shared = {key: value for key, value in sorted(run.settings.items()) if key not in keys}
    return {
        "run": run.name, "arm": arm, "experiment": run.experiment, "seed": run.seed, "state": run.status,
        "ended": run.ended, "seconds": record.summary["seconds"] if arm else None, "code": run.code,
        **{name: getattr(origin, name) for name in ORIGIN}, "versions": json.dumps(origin.versions),
        "differs_in": json.dumps(sorted(run.declared)), **{key: run.settings.get(key) for key in keys},
        "settings": json.dumps(shared),
    }  # fmt: skip


def write(folder: Path, tables: Frames) -> None:
    """Write the files, each atomically. Raises OSError."""
    for name, table in ((RUNS, tables.runs), (STEPS, tables.steps), (QUESTIONS, tables.questions)):
        data = io.BytesIO()
        table.to_parquet(data, index=False, compression="zstd", compression_level=19)
        replace_file(folder / name, data.getvalue())


def read_frames(folder: Path) -> Frames:
    """Read the files of `write`. Raises ConfigError for a missing or damaged file."""
    found = []
    for name in (RUNS, STEPS, QUESTIONS):
        try:
            found.append(pd.read_parquet(folder / name))
        except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
            raise ConfigError(
                f"{folder / name} cannot be read ({in_one_line(error)}). Make it again: python -m qerl_lab.report RUNS "
                f"{shell_word('out', folder)}."
            ) from None
    return Frames(*found)


def read(folder: Path) -> tuple[list[Record], dict[str, str]]:
    """Read a results folder: the records, and the damaged runs with the reason, by name. Raises ConfigError."""
    tables = read_frames(folder)
    try:
        return records_of(tables)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{folder} is not what a report writes there ({error!r}). Make it again.") from None


def records_of(tables: Frames) -> tuple[list[Record], dict[str, str]]:
    """Rebuild the records from the tables of `frames`, and the damaged runs with the reason, by name."""
    steps = {run: rows.drop(columns="run").set_index("step") for run, rows in tables.steps.groupby("run")}
    phases: dict[str, dict[str, pd.DataFrame]] = {}
    for (run, phase), rows in tables.questions.groupby(["run", "phase"], sort=False):
        phases.setdefault(run, {})[phase] = rows[["id", "accuracy"]]
    records, damaged = [], {}
    for row in tables.runs.to_dict("records"):
        if pd.isna(row["experiment"]):
            damaged[row["run"]] = row["state"]
            continue
        row = dict.fromkeys(ORIGIN, "") | row  # older files lack some columns
        origin = Origin(**{name: row[name] for name in ORIGIN} | {"versions": json.loads(row["versions"])})
        settings = {key: value for key, value in row.items() if key not in NOT_SETTINGS and not pd.isna(value)}
        run = Run(
            row["run"], RENAMED.get(row["experiment"], row["experiment"]), int(row["seed"]),
            normalize(json.loads(row["settings"]) | settings), frozenset(json.loads(row["differs_in"])), row["state"],
            row["ended"], row["code"],
        )  # fmt: skip
        if run.name in steps and run.status == FINISHED:
            asked = phases.get(run.name, {})
            if asked:
                check_phases(asked)
            records.append(record_of(run, steps[run.name], asked, row["seconds"], origin))
        else:
            records.append(Record(run, origin=origin))
    return records, damaged


NOT_SETTINGS = {
    "run", "arm", "experiment", "seed", "state", "ended", "seconds", "code", "differs_in", "settings", *ORIGIN,
    "missing", "sessions",  # columns of files that were written before
}  # fmt: skip
