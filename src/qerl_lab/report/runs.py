"""Read run directories as records, and summarize them in headline numbers."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import MetricsLine
from qerl_lab.report.arms import FINISHED, Run, code_version, run_from
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
    return _metrics_by_step(run.metrics())


def _metrics_by_step(lines: Sequence[MetricsLine]) -> pd.DataFrame:
    return pd.DataFrame([{"step": line["step"], **line["metrics"]} for line in lines]).groupby("step").last()


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


def read_record(run: RunDirectory, name: str) -> Record:
    """Read the record of a run. Raises OSError or ValueError if something is missing or damaged."""
    lines, values, sessions = run.checked_metrics(), run.settings(), run.environments()
    codes = (code_version(each.get("git_sha"), each.get("dirty")) for each in sessions or [{}])
    last = lines[-1] if lines else {"step": 0, "time": 0.0, "metrics": {}}
    found = run_from(
        values, name=name, ended=last["time"], code=_join_distinct(codes),
        status=_describe_status(run, f"step {last['step']} of {values.get('steps')}"),
        metrics={metric for line in lines for metric in line["metrics"]},
    )  # fmt: skip
    origin = _merge_origins(sessions, values)
    if found.status != FINISHED:
        return Record(found, origin=origin)
    phases = run.evaluations() if values["eval.questions"] != "0" else {}
    return record_of(found, _metrics_by_step(lines), phases, run.result()["seconds"], origin)


def record_of(
    run: Run, steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float, origin: Origin
) -> Record:
    """Build the record of a finished run from its metrics by step and its held-out answers by phase, if any."""
    steps = steps[[name for name in KEPT if name in steps]].dropna(axis=1, how="all").astype("float32")
    headline, accuracy = _compute_headline(steps.astype("float64"), phases, seconds), {}
    if phases:
        before, after = _accuracies_before_and_after(phases)
        after = after.reindex(before.index)
        accuracy = {"before": before, "after": after, "gain": after - before}
    return Record(run, headline, accuracy, steps, origin)


def _accuracies_before_and_after(phases: Mapping[str, pd.DataFrame]) -> tuple[pd.Series, pd.Series]:
    """Return accuracy by question, before and after training. Raises KeyError if a phase is missing."""
    before, after = (phases[phase].set_index("id")["accuracy"] for phase in ("before", "after"))
    return before, after


def _merge_origins(sessions: Sequence[Mapping[str, Any]], settings: Mapping[str, str]) -> Origin:
    """Merge the env.json of all sessions of a run into one Origin, joining values that differ."""
    data = sessions[0].get("data", {}) if sessions else {}
    gpus = [gpu["uuid"] for each in sessions for gpu in each.get("gpus", []) if "uuid" in gpu]
    is_of_sweep = any(each.get("sweep") for each in sessions)  # a single run has the keys too, without effect
    at_once = [f"{key}={settings[key]}" for key in ("jobs", "jobs_per_gpu") if key in settings and is_of_sweep]
    return Origin(
        command=_join_distinct(each.get("command", "") for each in sessions),
        configured=" ".join(at_once),
        began=sessions[0].get("time", "") if sessions else "",
        commit=_join_distinct(each.get("git_sha", "") for each in sessions),
        machine=_join_distinct(map(_describe_machine, sessions)),
        versions={name: text for each in sessions[::-1] for name, text in each.get("packages", {}).items()},
        training_sha256=data.get("training_sha256") or "",
        heldout_sha256=data.get("heldout_sha256") or "",
        place=" ".join(dict.fromkeys(gpus or [each.get("host", "") for each in sessions])).strip(),
        claims_sha256=settings.get("preregistration_sha256", "None").replace("None", ""),
    )


def _join_distinct(texts: Iterable[str]) -> str:
    return THEN.join(dict.fromkeys(text for text in texts if text))


def _describe_machine(environment: Mapping[str, Any]) -> str:
    """Describe a machine from env.json: `2 x NVIDIA H200 (driver 580.1), 16 CPUs: Intel ...`."""
    cards = Counter((gpu["name"], gpu.get("driver")) for gpu in environment.get("gpus", []))
    parts = [
        (f"{count} x " if count > 1 else "") + name + (f" (driver {driver})" if driver else "")
        for (name, driver), count in cards.items()
    ]
    if cpus := environment.get("cpus_usable"):
        model = environment.get("cpu")
        parts.append(f"{cpus} CPU{'s' * (cpus != 1)}" + (f": {model}" if model else ""))
    return ", ".join(parts)


def _describe_status(run: RunDirectory, reached: str) -> str:
    match run.status:
        case "done":
            return FINISHED
        case "failed":
            return f"failed ({textwrap.shorten(run.reason, REASON, placeholder=' ...')})"
        case "interrupted":
            return f"{run.status_in_words} ({reached})"
    return run.status


def summarize(run: RunDirectory, seconds: float) -> dict[str, Any]:
    """Summarize a finished run in headline numbers. `seconds` is the wall time of all sessions of the run.

    Entropy first and last are means over the first and the last tenth of the steps, since single steps are noisy.
    """
    return _compute_headline(read_steps(run), run.evaluations(), seconds)


def _compute_headline(steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float) -> dict[str, Any]:
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
    for phase in (name for name, rows in phases.items() if "truncated" in rows):  # older records lack it
        result[f"truncated_{phase}"] = float(phases[phase]["truncated"].mean())
    return result | _compute_gain(phases)


def gain_metrics(run: RunDirectory) -> dict[str, float]:
    """Return the metrics `eval/gain`, `eval/gain_low` and `eval/gain_high` of a run, as in `summarize`.

    Empty until both evaluations exist.
    """
    found = _compute_gain(run.evaluations())
    if not found:
        return {}
    low, high = found["accuracy_gain_interval"]
    return {"eval/gain": found["accuracy_gain"], "eval/gain_low": low, "eval/gain_high": high}


def _compute_gain(phases: Mapping[str, pd.DataFrame]) -> dict[str, Any]:
    if not {"before", "after"} <= set(phases):
        return {}
    before, after = _accuracies_before_and_after(phases)
    mean, low, high = paired_interval(before, after)
    return {
        "questions": len(after),
        "accuracy_before": float(before.mean()),
        "accuracy_after": float(after.mean()),
        "accuracy_gain": mean,
        "accuracy_gain_interval": [low, high],
    }
