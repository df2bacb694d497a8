"""Read run directories into pandas frames and report records."""

import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory, is_run
from qerl_lab.record.metrics import MetricsLine
from qerl_lab.report.arms import FINISHED, Run, run_from, version
from qerl_lab.report.stats import paired_interval

# Metrics used by tables, verdicts and figures; a report keeps no others.
KEPT = (
    "reward/mean", "reward/answer", "reward/format", "reward/zero_variance_groups", "policy/entropy_nats",
    "sampler/entropy_nats", "sampler/logprob_gap_mean", "sampler/kl_k3_nats", "rollout/tokens_per_second",
    "rollout/completion_tokens", "rollout/truncated_fraction", "step/seconds", "step/tokens_per_second",
    "seconds/rollout", "seconds/train", "seconds/sync", "noise/sigma", "noise/kl_nats", "memory/rss_gib",
    "memory/gpu_peak_gib", "eval/accuracy", "eval/entropy_nats", "eval/subset_accuracy",
)  # fmt: skip
THEN = " then "  # joins the values of a run's sessions
REASON = 300  # characters of a failure's reason; FAILED has all


def read_steps(run: RunDirectory) -> pd.DataFrame:
    """Read the metrics of a run: a row per step (index `step`), a column per metric. Step 0 is before training."""
    return _by_step(run.metrics())


def _by_step(lines: Sequence[MetricsLine]) -> pd.DataFrame:
    return pd.DataFrame([{"step": line["step"], **line["metrics"]} for line in lines]).groupby("step").last()


def kept_columns(steps: pd.DataFrame) -> pd.DataFrame:
    """Return the `KEPT` columns with data as float32, as results/ stores them, so that reports from there are equal."""
    return steps[[name for name in KEPT if name in steps]].dropna(axis=1, how="all").astype("float32")


@dataclass(frozen=True)
class Origin:
    """Where, when, with which versions and by which command a run ran. Empty text means not known.

    `versions` maps packages to versions. The two SHA-256 identify the training and the held-out questions; older
    records lack the second. `configured` holds the settings for jobs at once (`jobs=4 ...`), which a sweep file may
    set. `place` holds the UUIDs of the GPUs or, without one, the hosts, separated by blanks; older records lack it.
    `claims_sha256` identifies the claims file that the run was made to test (`preregistration`).
    """

    command: str = ""
    configured: str = ""
    began: str = ""
    commit: str = ""
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    training_sha256: str = ""
    heldout_sha256: str = ""
    place: str = ""
    claims_sha256: str = ""


NO_STEPS = pd.DataFrame(index=pd.Index([], dtype="int64", name="step"))


@dataclass(frozen=True)
class Record:
    """A run as a report reads it; an unfinished run has only `run` and `origin`.

    `summary` comes from `summarize`. `accuracy` maps "before", "after" and "gain" to the held-out accuracy by question
    id, and is empty without evaluation. `steps` comes from `read_steps`, limited to `KEPT`. `at_once` counts the runs
    at once on its machine, itself included; `comparison.compare` sets it.
    """

    run: Run
    summary: dict[str, Any] = field(default_factory=dict)
    accuracy: dict[str, pd.Series] = field(default_factory=dict)
    steps: pd.DataFrame = field(default_factory=lambda: NO_STEPS)
    origin: Origin = Origin()
    at_once: int = 1

    @property
    def allowed_at_once(self) -> list[int]:
        """Return how many jobs of its sweep may share the run's GPU or, without one, its machine, as far as given."""
        option = "jobs" if self.run.value("device") == "cpu" else "jobs_per_gpu"
        given = f"{self.origin.command} {self.origin.configured}"
        return [int(number) for number in re.findall(rf"\b{option}=(\d+)", given)]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Find the run directories at or below `folders`, each once. Raises ConfigError for a folder without any."""
    found: dict[Path, Path] = {}
    for folder in folders:
        inside = list(_walk(folder))
        if not inside:
            what = "holds no run directory" if folder.is_dir() else "is no directory"
            raise ConfigError(f"{folder} {what}. Type the directory of a run or of a sweep, for example runs.")
        found |= {path.resolve(): path for path in inside}
    return list(found.values())


def has_runs(folder: Path) -> bool:
    """Return whether a folder contains a run directory."""
    return any(True for _ in _walk(folder))


def _walk(folder: Path) -> Iterator[Path]:
    """Yield run directories, following links to other disks but visiting each folder once."""
    seen = set[str]()
    for path, folders, files in os.walk(folder, followlinks=True):
        is_new = os.path.realpath(path) not in seen
        seen.add(os.path.realpath(path))
        if is_new and is_run(files):
            yield Path(path)
        if not is_new or is_run(files):
            folders.clear()
        folders.sort(key=lambda name: (os.path.islink(os.path.join(path, name)), name))


def read_record(run: RunDirectory, name: str) -> Record:
    """Read the record of a run. Raises OSError or ValueError if something is missing or damaged."""
    lines, values, began = run.whole_metrics(), run.settings(), run.environments()
    metrics = {metric for line in lines for metric in line["metrics"]}
    if values.get("device") == "auto" and "memory/rss_gib" not in metrics and began and "gpus" in began[0]:
        values = values | {"device": str(run.device_kind())}  # no step ended, so no metric shows the device
    codes = dict.fromkeys(version(each.get("git_sha"), each.get("dirty")) for each in began or [{}])
    last = lines[-1] if lines else {"step": 0, "time": 0.0, "metrics": {}}
    found = run_from(
        values, name=name, status=_status(run, f"step {last['step']} of {values.get('steps')}"), ended=last["time"],
        code=THEN.join(codes), metrics=metrics,
    )  # fmt: skip
    origin = _origin(began, values)
    if found.status != FINISHED:
        return Record(found, origin=origin)
    phases = {}
    if values["eval.questions"] != "0":
        check_phases(phases := run.evaluations())
    return record_of(found, _by_step(lines), phases, run.result()["seconds"], origin)


def record_of(
    run: Run, steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float, origin: Origin
) -> Record:
    """Build the record of a finished run from its metrics by step and its held-out answers by phase, if any."""
    steps = kept_columns(steps)
    accuracy = {}
    if phases:
        before, after = _accuracies(phases)
        after = after.reindex(before.index)
        accuracy = {"before": before, "after": after, "gain": after - before}
    return Record(run, _headline(steps.astype("float64"), phases, seconds), accuracy, steps, origin)


def _accuracies(phases: Mapping[str, pd.DataFrame]) -> tuple[pd.Series, pd.Series]:
    """Return accuracy by question, before and after training."""
    before, after = (phases[phase].set_index("id")["accuracy"] for phase in ("before", "after"))
    return before, after


def _origin(sessions: Sequence[Mapping[str, Any]], settings: Mapping[str, str]) -> Origin:
    """Merge the env.json of a run's sessions, joining values that differ."""
    if not sessions:
        return Origin(claims_sha256=_claims_sha256(settings))
    first = sessions[0]
    gpus = [gpu["uuid"] for each in sessions for gpu in each.get("gpus", []) if "uuid" in gpu]
    places = dict.fromkeys(gpus or [each.get("host", "") for each in sessions])
    machines, commits, commands = (
        THEN.join(dict.fromkeys(text for text in texts if text))
        for texts in (
            [machine(each) for each in sessions],
            *([each.get(key, "") for each in sessions] for key in ("git_sha", "command")),
        )
    )
    versions = {name: text for each in sessions[::-1] for name, text in each.get("packages", {}).items()}
    at_once = [f"{key}={settings[key]}" for key in ("jobs", "jobs_per_gpu") if key in settings]
    configured = " ".join(at_once) if any(each.get("sweep") for each in sessions) else ""  # a single run has them too
    questions: dict[str, Any] = {
        key: first.get("data", {}).get(key) or "" for key in ("training_sha256", "heldout_sha256")
    }
    return Origin(
        command=commands, configured=configured, began=first.get("time", ""), commit=commits, machine=machines,
        versions=versions, place=" ".join(places).strip(),
        claims_sha256=_claims_sha256(settings), **questions,
    )  # fmt: skip


def _claims_sha256(settings: Mapping[str, str]) -> str:
    """Return the SHA-256 of the claims that a run was made to test, from its settings as text; empty if none."""
    return settings.get("preregistration_sha256", "None").replace("None", "")


def machine(environment: Mapping[str, Any]) -> str:
    """Describe a run's machine from its env.json: `2 x NVIDIA H200 (driver 580.1), 16 CPUs: Intel ...`."""
    parts = []
    for (name, driver), count in Counter(
        (gpu["name"], gpu.get("driver")) for gpu in environment.get("gpus", [])
    ).items():
        parts.append((f"{count} x " if count > 1 else "") + name + (f" (driver {driver})" if driver else ""))
    if cpus := environment.get("cpus_usable"):
        model = environment.get("cpu")
        parts.append(f"{cpus} CPU{'s' * (cpus != 1)}" + (f": {model}" if model else ""))
    return ", ".join(parts)


def _status(run: RunDirectory, reached: str) -> str:
    match run.status:
        case "done":
            return FINISHED
        case "failed":
            return f"failed ({textwrap.shorten(run.reason, REASON, placeholder=' ...')})"
        case "interrupted":
            return f"{run.status_in_words} ({reached})"
    return run.status


DAMAGE = (OSError, ValueError, KeyError)  # raised by reading a damaged record


def describe_damage(error: Exception) -> str:
    """Describe one of `DAMAGE` for a reader."""
    if isinstance(error, KeyError):
        return f"damaged (it lacks {error}; another version of the lab wrote it)"
    return f"damaged ({in_one_line(error)})"


def check_phases(phases: Mapping[str, pd.DataFrame]) -> None:
    """Raise ValueError unless the same questions were asked before and after training."""
    if not {"before", "after"} <= set(phases):
        raise ValueError(f"eval.parquet has the evaluations {sorted(phases)}, not those before and after training")
    before, after = (phases[phase]["id"] for phase in ("before", "after"))
    if not before.is_unique or set(before) != set(after) or len(before) != len(after):
        raise ValueError("eval.parquet does not hold the same questions before and after training")


def summarize(run: RunDirectory, seconds: float) -> dict[str, Any]:
    """Summarize a finished run in headline numbers. `seconds` is the wall time of all its sessions.

    Entropy first and last are means over the first and the last tenth of the steps, since single steps are noisy.
    """
    phases = run.evaluations()
    truncated = {  # share of truncated held-out completions; older records lack it
        f"truncated_{phase}": float(phases[phase]["truncated"].mean())
        for phase in ("before", "after") if phase in phases and "truncated" in phases[phase]
    }  # fmt: skip
    return _headline(read_steps(run), phases, seconds) | truncated


def _headline(steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float) -> dict[str, Any]:
    steps = steps.loc[1:]
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
    return result | _gain(phases)


def gain_metrics(run: RunDirectory) -> dict[str, float]:
    """Return `eval/gain` and the ends of its interval, as in `summarize`; empty until both evaluations exist."""
    found = _gain(run.evaluations())
    if not found:
        return {}
    low, high = found["accuracy_gain_interval"]
    return {"eval/gain": found["accuracy_gain"], "eval/gain_low": low, "eval/gain_high": high}


def _gain(phases: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    if not {"before", "after"} <= set(phases):
        return {}
    before, after = _accuracies(phases)
    mean, low, high = paired_interval(before, after)
    return {
        "questions": len(after),
        "accuracy_before": float(before.mean()),
        "accuracy_after": float(after.mean()),
        "accuracy_gain": mean,
        "accuracy_gain_interval": [low, high],
    }
