"""Run directories as pandas frames and as records of a report."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory, is_run
from qerl_lab.record.metrics import MetricsLine
from qerl_lab.report.arms import FINISHED, Run, run_from, version
from qerl_lab.report.stats import paired_interval


def read_steps(run: RunDirectory) -> pd.DataFrame:
    """Read the metrics of a run: a row a step (index `step`), a column a metric. Step 0 is before training."""
    rows = [{"step": line["step"], **line["metrics"]} for line in run.metrics()]
    return pd.DataFrame(rows).groupby("step").last()


@dataclass(frozen=True)
class Record:
    """A run directory as a report reads it; of a run that did not finish only `directory` and `run` are known.

    `summary` is that of `summarize`; `accuracy` has, for "before", "after" and "gain", the held-out accuracy by
    question id, and nothing for a run without evaluation.
    """

    directory: RunDirectory
    run: Run
    summary: dict[str, Any]
    accuracy: dict[str, pd.Series]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The run directories that are one of `folders` or lie in one, each once. Raises ConfigError where one has none."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = list(_walk(folder))
        if not inside:
            what = "holds no run directory" if folder.is_dir() else "is no directory"
            raise ConfigError(f"{folder} {what}. Type the directory of a run or of a sweep, for example runs.")
        found |= {path.resolve(): path for path in inside}
    return list(found.values())


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        if is_run(files):
            yield Path(path)
            folders.clear()
        folders.sort()


def read_record(run: RunDirectory, name: str) -> Record:
    """The record of a run. Raises OSError or ValueError that says what of it is missing or damaged."""
    lines, values, began = run.metrics(), run.settings(), run.environment()
    found = run_from(
        values, name=name, status=_status(run), ended=lines[-1]["time"] if lines else 0.0,
        code=version(began.get("git_sha"), began.get("dirty")),
        metrics={metric for line in lines for metric in line["metrics"]},
    )  # fmt: skip
    if found.status != FINISHED:
        return Record(run, found, {}, {})
    _check_steps(lines, int(values["steps"]))
    accuracy = {} if values["eval.questions"] == "0" else _accuracy(run)
    return Record(run, found, summarize(run, run.result()["seconds"]), accuracy)


def _status(run: RunDirectory) -> str:
    match run.status:
        case "done":
            return FINISHED
        case "failed":
            return f"failed ({run.reason})"
        case "interrupted":
            return "interrupted, or still running"
    return run.status


def _check_steps(lines: Sequence[MetricsLine], steps: int) -> None:
    missing = sorted(set(range(1, steps + 1)) - {line["step"] for line in lines})
    if missing:
        raise ValueError(f"metrics.jsonl lacks {len(missing)} of {steps} steps, the first of them {missing[0]}")


def _accuracy(run: RunDirectory) -> dict[str, pd.Series]:
    phases = {phase: rows.set_index("id")["accuracy"] for phase, rows in run.evaluations().items()}
    if not {"before", "after"} <= set(phases):
        raise ValueError(f"eval.parquet has the evaluations {sorted(phases)}, not those before and after training")
    before, after = phases["before"], phases["after"]
    if not before.index.is_unique or set(before.index) != set(after.index):
        raise ValueError("eval.parquet does not hold the same questions before and after training")
    return {"before": before, "after": after.reindex(before.index), "gain": after.reindex(before.index) - before}


def summarize(run: RunDirectory, seconds: float) -> dict[str, Any]:
    """The headline numbers of a finished run, from its record. `seconds` is the wall time of all its sessions.

    Entropy first and last are means over the first and the last tenth of the steps (one step is noisy).
    """
    steps = read_steps(run).loc[1:]
    tenth = max(1, len(steps) // 10)
    spent = steps["step/seconds"].sum()
    tokens = (steps["step/tokens_per_second"] * steps["step/seconds"]).sum()
    result = {
        "steps": int(steps.index.max()),
        "entropy_first": float(steps["policy/entropy_nats"].head(tenth).mean()),
        "entropy_last": float(steps["policy/entropy_nats"].tail(tenth).mean()),
        "reward_first": float(steps["reward/mean"].head(tenth).mean()),
        "reward_last": float(steps["reward/mean"].tail(tenth).mean()),
        "tokens_per_second": float(tokens / spent),
        "rollout_tokens_per_second": float(tokens / steps["seconds/rollout"].sum()),
        **{f"share_{name}": float(steps[f"seconds/{name}"].sum() / spent) for name in ("rollout", "train", "sync")},
        "memory_rss_gib": float(steps["memory/rss_gib"].max()),
        "seconds": seconds,
    }
    if "memory/gpu_peak_gib" in steps:
        result["memory_gpu_peak_gib"] = float(steps["memory/gpu_peak_gib"].max())
    return result | _gain(run.evaluations())


def gain_metrics(run: RunDirectory) -> dict[str, float]:
    """`eval/gain` and the ends of its interval, as `summarize` has them; nothing before both evaluations are there."""
    found = _gain(run.evaluations())
    if not found:
        return {}
    low, high = found["accuracy_gain_interval"]
    return {"eval/gain": found["accuracy_gain"], "eval/gain_low": low, "eval/gain_high": high}


def _gain(phases: dict[str, pd.DataFrame]) -> dict[str, Any]:
    if not {"before", "after"} <= set(phases):
        return {}
    before, after = (phases[phase].set_index("id")["accuracy"] for phase in ("before", "after"))
    mean, low, high = paired_interval(before, after)
    return {
        "questions": len(after),
        "accuracy_before": float(before.mean()),
        "accuracy_after": float(after.mean()),
        "accuracy_gain": mean,
        "accuracy_gain_interval": [low, high],
    }
