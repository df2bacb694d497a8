"""Read runs, from their directories or from stored results, and store them as Parquet that is small enough to commit.

runs.parquet       a row per run found: arm, seed, state, origin, a column per setting that differs, the other settings
                   as JSON in `settings`; only name and state for a damaged run
steps.parquet      a row per run and step: `run`, `step`, and the metrics of `runs.KEPT` as float32
questions.parquet  a row per run, phase ("before", "after") and held-out question: its accuracy over the samples

Steps and questions cover the runs that count.
"""

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import pandas as pd

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_override
from qerl_lab.record.directory import RunDirectory, is_run
from qerl_lab.report.arms import differing_keys, run_key
from qerl_lab.report.runs import Origin, Run, read_run, run_from
from qerl_lab.system.disk import replace_file
from qerl_lab.system.terminal import format_path

RUNS, STEPS, QUESTIONS = "runs.parquet", "steps.parquet", "questions.parquet"
Tables = dict[str, pd.DataFrame]  # the content of the three files, by name
ORIGIN = tuple(field.name for field in fields(Origin))
NOT_SETTINGS = {  # columns of runs.parquet that are no settings
    "run", "arm", "experiment", "seed", "state", "ended", "seconds", "code", "differs_in", "settings", *ORIGIN,
    "missing", "sessions",  # columns of older files
}  # fmt: skip


def find_folder(path: str) -> Path:
    """Find the folder `path` in the working directory or, for notebooks, in the folder above.

    Raises ConfigError if neither has it.
    """
    given = Path(path).expanduser()
    for folder in (given, Path.cwd().parent / given):
        if folder.is_dir():
            return folder
    raise ConfigError(f"{path} is no directory, here or in the folder above {Path.cwd()}. Type its whole path.")


def read_all(folders: Sequence[Path]) -> tuple[list[Run], dict[str, str]]:
    """Read every run in `folders`; return the runs, and a dict from the name of each damaged run to the reason.

    A folder with both results and run directories is read as both, as the directories may be newer. Raises ConfigError
    for a folder with neither.
    """
    placed_runs, damaged, directories = list[tuple[Path, Run]](), dict[str, str](), dict[Path, Path]()
    for folder in folders:
        has_results = (folder / RUNS).is_file()
        runs, broken = read(folder) if has_results else ([], {})
        placed_runs += [(folder, run) for run in runs]
        damaged |= broken
        inside = {path.resolve(): path for path in _walk_run_directories(folder)}
        if not inside and not has_results:
            what = f"holds no run directory and no {RUNS} of a report" if folder.is_dir() else "is no directory"
            raise ConfigError(f"{folder} {what}. Type the directory of a run or of a sweep, for example runs.")
        directories |= inside
    for path in directories.values():
        try:
            placed_runs.append((path.parent, read_run(RunDirectory(path), format_path(path))))
        except (OSError, ValueError) as error:
            damaged[format_path(path)] = f"damaged ({in_one_line(error)})"
        except KeyError as error:
            damaged[format_path(path)] = f"damaged (it lacks {error}; another version of the lab wrote it)"
    named, first = [], dict[str, Run]()
    for folder, run in placed_runs:
        if run_key(first.setdefault(run.name, run)) != run_key(run):  # two machines call different runs runs/0
            run = replace(run, name=f"{run.name} of {format_path(folder)}")
        named.append(run)
    return named, {name: why for name, why in damaged.items() if name not in first}


def _walk_run_directories(folder: Path) -> Iterator[Path]:
    """Yield run directories at or below `folder`, following links to other disks but visiting each folder once."""
    visited = set[str]()
    for path, folders, files in os.walk(folder, followlinks=True):
        is_new = os.path.realpath(path) not in visited
        visited.add(os.path.realpath(path))
        if is_new and is_run(files):
            yield Path(path)
        if not is_new or is_run(files):
            folders.clear()
        folders.sort(key=lambda name: (os.path.islink(os.path.join(path, name)), name))


def to_tables(runs: Sequence[Run], damaged: Mapping[str, str], arm_of: Mapping[str, str]) -> Tables:
    """Build the tables of a results folder by file name; the module's docstring describes them.

    `damaged` maps names of unreadable runs to reasons, `arm_of` names of runs that count to labels of arms.
    """
    keys, rows = differing_keys(runs), []
    for run in runs:
        arm = arm_of.get(run.name)
        shared = {key: value for key, value in sorted(run.settings.items()) if key not in keys}
        rows.append({
            "run": run.name, "arm": arm, "experiment": run.experiment, "seed": run.seed, "state": run.status,
            "ended": run.ended, "seconds": run.summary["seconds"] if arm else None, "code": run.code,
            **vars(run.origin), "versions": json.dumps(run.origin.versions),
            "differs_in": json.dumps(sorted(run.declared)), **{key: run.settings.get(key) for key in keys},
            "settings": json.dumps(shared),
        })  # fmt: skip
    rows += [{"run": name, "experiment": None, "state": why} for name, why in damaged.items()]
    counted = [run for run in runs if run.name in arm_of]
    steps = [run.steps.reset_index().assign(run=run.name) for run in counted]
    asked = [
        pd.DataFrame({"run": run.name, "phase": phase, "id": values.index, "accuracy": values.to_numpy(float)})
        for run in counted for phase, values in run.accuracy.items() if phase != "gain"
    ]  # fmt: skip
    no_questions = pd.DataFrame(columns=["run", "phase", "id", "accuracy"])
    return {
        RUNS: pd.DataFrame(rows),
        STEPS: pd.concat(steps, ignore_index=True),
        QUESTIONS: pd.concat(asked or [no_questions], ignore_index=True),
    }


def write(folder: Path, tables: Tables) -> None:
    """Write the tables of `to_tables` to a results folder as Parquet, each file atomically.

    Raises OSError if a file cannot be written.
    """
    for name, table in tables.items():
        data = io.BytesIO()
        table.to_parquet(data, index=False, compression="zstd", compression_level=19)
        replace_file(folder / name, data.getvalue())


def read(folder: Path) -> tuple[list[Run], dict[str, str]]:
    """Read the runs of a results folder; return them, and a dict from the name of each damaged run to the reason.

    Raises ConfigError if a file is missing, or is not what a report writes.
    """
    try:
        return from_tables({name: _read_table(folder / name) for name in (RUNS, STEPS, QUESTIONS)})
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{folder} does not hold what a report writes ({error!r}). Make it again: "
            f"python -m qerl_lab.report RUNS {shell_override('out', folder)}."
        ) from None


def _read_table(file: Path) -> pd.DataFrame:
    """Read a Parquet file. Raises ValueError with the file's name, which pandas 2 leaves out, if it cannot be read."""
    try:
        return pd.read_parquet(file)
    except (OSError, ValueError) as error:  # pyarrow's are ValueErrors
        raise ValueError(f"{file}: {error}") from error


def from_tables(tables: Tables) -> tuple[list[Run], dict[str, str]]:
    """Rebuild what `read` returns from its tables. Raises KeyError or ValueError for tables not made by `to_tables`."""
    steps = {run: rows.drop(columns="run").set_index("step") for run, rows in tables[STEPS].groupby("run")}
    phases: dict[str, dict[str, pd.DataFrame]] = {}
    for (run, phase), rows in tables[QUESTIONS].groupby(["run", "phase"], sort=False):
        phases.setdefault(run, {})[phase] = rows[["id", "accuracy"]]
    is_damaged = tables[RUNS]["experiment"].isna()
    runs = []
    for row in tables[RUNS][~is_damaged].to_dict("records"):
        present = {key: value for key, value in row.items() if not pd.isna(value)}
        row = dict.fromkeys(ORIGIN, "") | present  # older files lack some columns
        settings = {key: value for key, value in row.items() if key not in NOT_SETTINGS}
        run = run_from(
            json.loads(row["settings"]) | settings | {key: row[key] for key in ("experiment", "seed", "differs_in")},
            name=row["run"], status=row["state"], ended=row["ended"], code=row["code"], metrics=[],
            origin=Origin(**{name: row[name] for name in ORIGIN} | {"versions": json.loads(row["versions"])}),
        )  # fmt: skip
        if "arm" in row:  # the run counts
            run = run.with_measurements(steps[run.name], phases.get(run.name, {}), row["seconds"])
        runs.append(run)
    return runs, dict(tables[RUNS][is_damaged].set_index("run")["state"])
