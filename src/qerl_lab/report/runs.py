"""Read run directories, and summarize each run in headline numbers."""

import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from qerl_lab.config.arm import drop_idle_options, fill_added_keys, keys_of_arm, model_by_content
from qerl_lab.config.message import with_noun
from qerl_lab.record.directory import RunDirectory
from qerl_lab.report.stats import clip_interval, paired_interval

FINISHED = "finished"
ABSENT = "(absent)"  # stands for a setting that a run lacks
RENAMED = {"bf16_hot": "bf16_temperature", "bf16_bonus": "bf16_entropy_bonus"}  # earlier -> present name
# Metrics that a report keeps: those of tables, verdicts and figures, and some that explain them.
KEPT = (
    "reward/mean", "reward/answer", "reward/format", "reward/zero_variance_groups", "policy/entropy_nats",
    "policy/entropy_forking_nats", "policy/entropy_rest_nats", "sampler/entropy_nats", "sampler/logprob_gap_mean",
    "sampler/kl_k3_nats", "sampler/effective_sample_size", "rollout/tokens_per_second", "rollout/completion_tokens",
    "rollout/truncated_fraction", "rollout/answer_entropy_nats", "rollout/staleness", "step/seconds",
    "step/tokens_per_second", "seconds/rollout", "seconds/train", "seconds/sync", "noise/sigma", "noise/kl_nats",
    "memory/rss_gib", "memory/gpu_peak_gib", "eval/accuracy", "eval/entropy_nats", "eval/subset_accuracy",
)  # fmt: skip
REASON = 300  # most characters of a failure's reason; the file FAILED has all
SHARES = ("rollout", "train", "sync")  # phases of every run: their shares of the time are headline numbers
NO_STEPS = pd.DataFrame(index=pd.Index([], dtype="int64", name="step"))
Arm = tuple[tuple[str, str], ...]  # the settings that define an arm, sorted


@dataclass(frozen=True)
class Origin:
    """Where, when, with which versions and by which command a run ran. Empty text means not known."""

    command: str = ""
    configured: str = ""  # such as `scale=NAME jobs=4 task.module=FILE.py`: labels, and jobs at once of a sweep
    began: str = ""  # start of the first session, ISO 8601
    commit: str = ""
    machine: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    training_sha256: str = ""  # of the training questions
    heldout_sha256: str = ""  # of the held-out questions; older records lack it
    pauses: str = ""  # between sessions: START-END in Unix seconds, separated by blanks; older records lack them
    place: str = ""  # UUIDs of the GPUs or, without a GPU, hosts; separated by blanks; older records lack it
    hub_model_hash: str = ""  # of a model from the hub, when it was downloaded; older records lack it
    claims_sha256: str = ""  # of the claims file that the run was made to test (`preregistration`)


@dataclass(frozen=True, eq=False)
class Run:
    """A run as a report reads it. An unfinished run has no summary, accuracy or steps."""

    name: str
    experiment: str  # its present name in conf/experiment/
    seed: int
    settings: Mapping[str, str]  # by dotted key; those that define the arm, and always model.path
    declared: frozenset[str]  # keys in which its experiment is meant to differ from others (`differs_in`)
    status: str  # `FINISHED`, or what happened instead
    ended: float  # in unix seconds
    code: str  # the commit, from `code_version`
    origin: Origin = Origin()
    summary: Mapping[str, Any] = field(default_factory=dict)  # headline numbers, from `summarize`
    accuracy: Mapping[str, pd.Series] = field(default_factory=dict)  # "before", "after", "gain", by question id
    steps: pd.DataFrame = field(default_factory=lambda: NO_STEPS)  # from `read_steps`, limited to `KEPT`
    at_once: int = 1  # the most runs at once on its machine, itself included; set by `arms.count_overlaps`

    @property
    def arm(self) -> Arm:
        """Return the settings that define the arm to which the run belongs, as sorted (key, value) pairs."""
        return tuple(sorted(model_by_content(self.settings).items()))

    @property
    def is_finished(self) -> bool:
        """Tell whether the run trained all its steps; others failed, were interrupted or are still running."""
        return self.status == FINISHED

    @property
    def configured(self) -> dict[str, str]:
        """Parse `origin.configured` into a dict, such as {"scale": "pocket", "task.module": "FILE.py"}.

        Older results lack both keys.
        """
        return dict(word.split("=", 1) for word in self.origin.configured.split())

    def worked(self) -> list[tuple[float, float]]:
        """Return (begin, end) of each session in Unix seconds; a start that is not recorded counts as `ended`.

        Each ends a second early, because starts are recorded in whole seconds, rounded down.
        """
        begin = datetime.fromisoformat(self.origin.began).timestamp() if self.origin.began else self.ended
        spans = []
        for pause in self.origin.pauses.split():
            stopped, resumed = map(float, pause.split("-"))
            spans.append((begin, stopped - 1))
            begin = resumed
        return [*spans, (begin, self.ended - 1)]

    def value(self, key: str) -> str:
        """Return the setting `key` as text, or `ABSENT` if the run's record (of another version, say) lacks the key."""
        return self.settings.get(key, ABSENT)

    def with_measurements(self, steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float) -> "Run":
        """Return a copy of the run with measurements: `steps`, and `accuracy` and `summary`, which are computed here.

        `steps` has a row per step and a column per metric. `phases` maps "before" and "after" to held-out answers, a
        row per question; it is empty without evaluation. `seconds` is the wall time of all sessions. Raises KeyError if
        a metric or phase is missing.
        """
        steps = steps[[name for name in KEPT if name in steps]].dropna(axis=1, how="all").astype("float32")
        summary, accuracy = summarize(steps.astype("float64"), phases, seconds), {}
        if phases:
            before, after = _accuracies(phases)
            accuracy = {"before": before, "after": after, "gain": after - before}
        return replace(self, steps=steps, accuracy=accuracy, summary=summary)


def run_from(
    values: Mapping[str, str], *, name: str, status: str, ended: float, code: str, metrics: Collection[str],
    origin: Origin = Origin(),
) -> Run:  # fmt: skip
    """Build a Run without measurements from `values`, its configuration as text by dotted key.

    `metrics` are the names of recorded metrics, which tell whether device=auto was cpu or cuda. The other arguments are
    fields of Run. Raises KeyError if a key is missing.
    """
    device, seed, declared = values["device"], int(values["seed"]), yaml.safe_load(values["differs_in"])
    experiment = RENAMED.get(values["experiment"], values["experiment"])
    if device == "auto" and metrics:  # the first GPU if torch saw one; its peak memory is then recorded
        device = "cuda" if "memory/gpu_peak_gib" in metrics else "cpu"
    normalized = normalize(dict(values) | {"device": device})
    keys = keys_of_arm(normalized) | {"device"}
    settings = {key: value for key, value in normalized.items() if key in keys}
    if settings.get("model.hash") == "None":  # older records lack the key, which means the same
        del settings["model.hash"]
    return Run(
        name=name, experiment=experiment, seed=seed, settings=settings, declared=frozenset(declared), status=status,
        ended=ended, code=code, origin=origin,
    )  # fmt: skip


def normalize(settings: Mapping[str, str]) -> dict[str, str]:
    """Translate settings of any version of the lab to today's keys, so that all runs of one arm have equal settings.

    A key that the version lacked is added, with the value that the version used. Dropped are keys that no longer exist,
    and options that the run ignores (`drop_idle_options`). With device=cpu optim.packing=off becomes auto, which does
    the same.
    """
    translated = drop_idle_options(fill_added_keys(settings))
    if translated["device"] == "cpu" and translated.get("optim.packing") == "off":  # `auto` packs on GPUs only
        translated["optim.packing"] = "auto"
    return translated


def code_version(git_sha: str | None, dirty: bool | None) -> str:
    """Format the commit of a run's code, from its env.json: `1a2b3c4`, or `1a2b3c4 with changes`."""
    return f"{(git_sha or 'unknown')[:7]}{' with changes' if dirty else ''}"


def read_run(directory: RunDirectory, name: str) -> Run:
    """Read a run directory as a Run called `name`, with measurements if the run is finished.

    Raises OSError, ValueError or KeyError if a file of the run, or an entry in it, is missing or damaged.
    """
    lines, values, sessions = directory.checked_metrics(), directory.settings(), directory.environments()
    last = lines[-1] if lines else {"step": 0, "time": 0.0}
    status = directory.status_in_words
    if directory.status == "done":
        status = FINISHED
    elif directory.status == "failed":
        status = f"failed ({textwrap.shorten(directory.reason, REASON, placeholder=' ...')})"
    elif directory.status == "interrupted":
        status += f" (step {last['step']} of {values.get('steps')})"

    def join_sessions(texts: Iterable[str]) -> str:
        """Join texts by ` then `, as in `A then B`. `texts` has one text per session of the run.

        Empty and repeated texts are dropped.
        """
        return " then ".join(dict.fromkeys(text for text in texts if text))

    first = sessions[0] if sessions else {}
    data = first.get("data", {})
    gpus = [gpu["uuid"] for session in sessions for gpu in session.get("gpus", []) if "uuid" in gpu]
    is_of_sweep = any(session.get("sweep") for session in sessions)  # a single run has jobs=N in its command, if typed
    wanted = ("scale", "jobs", "jobs_per_gpu") if is_of_sweep else ("scale",)
    configured = {key: values[key] for key in wanted if key in values}
    if values.get("task.module_hash", "None") != "None":
        configured["task.module"] = "_".join(Path(values["task.module"]).name.split())
    claims_sha256 = values.get("preregistration_sha256", "None")
    origin = Origin(
        command=join_sessions(session.get("command", "") for session in sessions),
        configured=" ".join(f"{key}={value}" for key, value in configured.items()),
        began=first.get("time", ""),
        commit=join_sessions(session.get("git_sha", "") for session in sessions),
        machine=join_sessions(map(_describe_machine, sessions)),
        versions={name: text for session in sessions[::-1] for name, text in session.get("packages", {}).items()},
        training_sha256=data.get("training_sha256") or "",
        heldout_sha256=data.get("heldout_sha256") or "",
        pauses=" ".join(f"{end:.0f}-{start:.0f}" for (_, end), (start, _) in pairwise(directory.sessions())),
        place=" ".join(dict.fromkeys(gpus or [session.get("host", "") for session in sessions])).strip(),
        hub_model_hash=(first.get("model") or {}).get("hash", ""),
        claims_sha256="" if claims_sha256 == "None" else claims_sha256,
    )
    code = join_sessions(code_version(session.get("git_sha"), session.get("dirty")) for session in sessions or [{}])
    recorded = {metric for line in lines for metric in line["metrics"]}
    run = run_from(values, name=name, status=status, ended=last["time"], code=code, metrics=recorded, origin=origin)
    if not run.is_finished:
        return run
    phases = directory.evaluations() if values["eval.questions"] != "0" else {}
    return run.with_measurements(read_steps(directory), phases, directory.result()["seconds"])


def _describe_machine(environment: Mapping[str, Any]) -> str:
    """Describe a machine from env.json: `2 x NVIDIA H200 (driver 580.1), 16 CPUs: Intel ...`."""
    cards = Counter((gpu["name"], gpu.get("driver")) for gpu in environment.get("gpus", []))
    parts = []
    for (name, driver), count in cards.items():
        times = f"{count} x " if count > 1 else ""
        parts.append(f"{times}{name} (driver {driver})" if driver else f"{times}{name}")
    if cpus := environment.get("cpus_usable"):
        model = environment.get("cpu")
        parts.append(with_noun(cpus, "CPU") + (f": {model}" if model else ""))
    return ", ".join(parts)


def read_steps(directory: RunDirectory) -> pd.DataFrame:
    """Read the metrics of a run: a row per step (index `step`), a column per metric. Step 0 is before training."""
    rows = [{"step": line["step"], **line["metrics"]} for line in directory.metrics()]
    return pd.DataFrame(rows).groupby("step").last()


def first_tenth(steps: pd.Series) -> pd.Series:
    """Return the first tenth of `steps`, a series with one value per step; at least one value."""
    return steps.head(max(1, len(steps) // 10))


def last_tenth(steps: pd.Series) -> pd.Series:
    """Return the last tenth of `steps`, a series with one value per step; at least one value."""
    return steps.tail(max(1, len(steps) // 10))


def share_of_time(steps: pd.DataFrame, phase: str) -> float:
    """Return the seconds of a phase as a share of the seconds of all steps; 0 if it was not recorded.

    Step 0, before training, has no seconds.
    """
    if f"seconds/{phase}" not in steps:
        return 0.0
    return float(steps[f"seconds/{phase}"].sum() / steps["step/seconds"].sum())


def summarize(steps: pd.DataFrame, phases: Mapping[str, pd.DataFrame], seconds: float) -> dict[str, Any]:
    """Compute a run's headline numbers, by name: entropy, reward, speed, time, memory and accuracy.

    `steps` has the metrics of each step. `phases` maps the phases, such as "before" and "after", to held-out answers.
    The first and last values of entropy and reward are means over the first and last tenth of the steps, because single
    steps are noisy. Step 0 is left out. `seconds` is the wall time of all sessions.
    """
    steps = steps.loc[1:]
    spent = steps["step/seconds"].sum()
    tokens = steps["step/tokens_per_second"] * steps["step/seconds"]
    # Not seconds/rollout: it is the first process's own time, and the wait only for the batch of a step sampled ahead.
    generation = tokens / steps["rollout/tokens_per_second"]
    result = {
        "steps": int(steps.index.max()),
        "entropy_first": float(first_tenth(steps["policy/entropy_nats"]).mean()),
        "entropy_last": float(last_tenth(steps["policy/entropy_nats"]).mean()),
        "reward_first": float(first_tenth(steps["reward/mean"]).mean()),
        "reward_last": float(last_tenth(steps["reward/mean"]).mean()),
        "tokens_per_second": float(tokens.sum() / spent),
        "rollout_tokens_per_second": float(tokens.sum() / generation.sum()),
        **{f"share_{name}": share_of_time(steps, name) for name in SHARES},
        "memory_rss_gib": float(steps["memory/rss_gib"].max()),
        "seconds": seconds,
    }
    if "memory/gpu_peak_gib" in steps:
        result["memory_gpu_peak_gib"] = float(steps["memory/gpu_peak_gib"].max())
    for phase, rows in phases.items():
        if "truncated" in rows:  # older records lack it
            result[f"truncated_{phase}"] = float(rows["truncated"].mean())
    if not {"before", "after"} <= set(phases):
        return result
    before, after = _accuracies(phases)
    gain, *interval = clip_interval(paired_interval(before, after), -1, 1)
    return result | {
        "questions": len(after),
        "accuracy_before": float(before.mean()),
        "accuracy_after": float(after.mean()),
        "accuracy_gain": gain,
        "accuracy_gain_interval": interval,
    }


def gain_metrics(directory: RunDirectory) -> dict[str, float]:
    """Return the gain in held-out accuracy with its 95% interval, as `eval/gain`, `eval/gain_low` and `eval/gain_high`.

    Raises KeyError if an evaluation, before or after training, is missing.
    """
    interval = clip_interval(paired_interval(*_accuracies(directory.evaluations())), -1, 1)
    return dict(zip(("eval/gain", "eval/gain_low", "eval/gain_high"), interval, strict=True))


def _accuracies(phases: Mapping[str, pd.DataFrame]) -> tuple[pd.Series, pd.Series]:
    """Return held-out accuracy by question id, before and after training. Raises KeyError if a phase is missing."""
    before, after = (phases[phase].set_index("id")["accuracy"] for phase in ("before", "after"))
    return before, after
