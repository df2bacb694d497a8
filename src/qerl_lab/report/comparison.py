"""Compare arms: choose the runs that count, and build a row per run, a row per arm, and the text of the report."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.report import results
from qerl_lab.report.arms import (
    ABSENT,
    CONTENT,
    PLACE,
    TASK,
    Run,
    choose_runs,
    differing_keys,
    is_unfinished,
    labels,
    shorten,
    task_of,
)
from qerl_lab.report.matching import count_overlaps, drop_copies, match_questions
from qerl_lab.report.runs import Record
from qerl_lab.report.stats import SHARE, format_interval, mean_of_arm
from qerl_lab.system.terminal import columns

BASELINE = "bf16"  # the default baseline
# Conditions under which a verdict holds; a table that mixes values of one says so.
CONDITIONS = (
    "model.path", "model.hash", "rollout.importance_correction", "rollout.temperature", "eval.temperature",
    "optim.learning_rate", "algorithm.updates_per_rollout",
)  # fmt: skip
OF_A_RUN = ("entropy_first", "entropy_last", "reward_last", "tokens_per_second", "memory_rss_gib", "seconds")
TIMED = ("tokens_per_second", "seconds")  # not this run's own if it shared its machine
HOW_TO_READ = """\
Intervals are 95%, over seeds and questions; one seed has none. Intervals of two arms may overlap although the arms
differ: read the difference, which is paired by seed and question. One in 20 true differences of 0 looks real."""


@dataclass(frozen=True)
class Comparison:
    """The arms by label, each with the records that count.

    `records` holds every readable run; `damaged` maps the names of the others to the reason; `left_out` has a line for
    each run that does not count.
    """

    arms: dict[str, list[Record]]
    records: list[Record]
    damaged: dict[str, str]
    left_out: list[str]

    @property
    def all_runs(self) -> list[Run]:
        """Return every run that was read, whether it counts or not."""
        return [record.run for record in self.records]

    @property
    def arm_of(self) -> dict[str, str]:
        """Map the name of each run that counts to the label of its arm."""
        return {record.run.name: label for label, records in self.arms.items() for record in records}

    def require_counted(self) -> "Comparison":
        """Return the comparison unchanged. Raises ConfigError if no run counts."""
        if not self.arms:
            raise ConfigError("no run counts:\n  " + "\n  ".join(self.left_out or ["there is none"]))
        return self

    @property
    def started(self) -> list[Run]:
        """Return the runs that count and those that did not finish."""
        return [*(record.run for record in self.counted), *filter(is_unfinished, self.all_runs)]

    @property
    def alone(self) -> list[str]:
        """Return the labels of arms whose runs shared no machine: only these have meaningful seconds and tokens/s."""
        return [arm for arm, records in self.arms.items() if all(record.at_once == 1 for record in records)]

    @property
    def counted(self) -> list[Record]:
        """Return the records of all runs that count, arm by arm."""
        return [record for records in self.arms.values() for record in records]


def read(folders: Sequence[Path]) -> Comparison:
    """Read every run in `folders`, of runs or of results, and group them into arms.

    Raises ConfigError if there is none, or if none counts.
    """
    return compare(*results.read_all(folders)).require_counted()


def compare(records: list[Record], damaged: dict[str, str]) -> Comparison:
    """Choose the records that count and group them into arms; no arms if no run finished."""
    records = count_overlaps(drop_copies(match_questions(records)))
    by_name = {record.run.name: record for record in records}
    counted, left_out = choose_runs([record.run for record in records])
    names, arms = labels(counted), dict[str, list[Record]]()
    for run in counted:
        arms.setdefault(names[run.arm], []).append(by_name[run.name])
    return Comparison(arms, records, damaged, [*left_out, *(f"{name}: {why}" for name, why in damaged.items())])


def by_run(comparison: Comparison) -> pd.DataFrame:
    """Return a row per run: arm, settings that differ, seed, accuracies, gain (interval over questions), `OF_A_RUN`."""
    keys, rows = differing_keys([record.run for record in comparison.counted]), []
    for record in comparison.counted:
        run, summary = record.run, record.summary
        row = {"arm": comparison.arm_of[run.name], **{key: run.value(key) for key in keys}, "seed": run.seed}
        if record.accuracy:
            row |= {name: summary[name] for name in ("questions", "accuracy_before", "accuracy_after")}
            row |= _interval_columns("gain", (summary["accuracy_gain"], *summary["accuracy_gain_interval"]))
        shared = TIMED if record.at_once > 1 else ()
        own = {name: math.nan if name in shared else summary[name] for name in OF_A_RUN}
        rows.append(row | own | {"code": run.code})
    return pd.DataFrame(rows)


def by_arm(comparison: Comparison, baseline: str | None) -> pd.DataFrame:
    """Return a row per arm: means over seeds, and accuracies with intervals over seeds and questions (`_low`, `_high`).

    `difference` and `gain_difference` compare accuracy after training and gain with the arm `baseline`, over the seeds
    that both have.
    """
    rows = []
    for label, records in comparison.arms.items():
        row: dict[str, Any] = {
            "arm": label,
            "seeds": len(records),
            "runs": sum(run.arm == records[0].run.arm for run in comparison.started),
            "questions": matrix(records, "after").shape[1],
        }
        for phase, name in (("before", "accuracy_before"), ("after", "accuracy_after"), ("gain", "gain")):
            row |= _interval_columns(name, mean_of_arm(matrix(records, phase), (-1, 1) if phase == "gain" else SHARE))
        if baseline is not None and label != baseline:
            for phase, name in (("after", "difference"), ("gain", "gain_difference")):
                differences = matrix(records, phase) - matrix(comparison.arms[baseline], phase)
                row |= _interval_columns(name, mean_of_arm(differences, (-2, 2) if phase == "gain" else (-1, 1)))
        for name in ("entropy_first", "entropy_last"):
            row[name] = float(np.mean([record.summary[name] for record in records]))
        rows.append(row | {"code": ", ".join(sorted({record.run.code for record in records}))})
    return pd.DataFrame(rows)


def matrix(records: Sequence[Record], phase: str) -> pd.DataFrame:
    """Return accuracies (before, after) or gains [seeds, questions] on the questions that every seed was asked."""
    of_seed = {record.run.seed: record.accuracy[phase] for record in records if record.accuracy}
    return pd.DataFrame(of_seed).T.dropna(axis=1)


def _interval_columns(name: str, interval: Sequence[float]) -> dict[str, float]:
    """Return mean and ends of an interval as columns NAME, NAME_low and NAME_high, without those that are nan."""
    named = zip((name, f"{name}_low", f"{name}_high"), interval, strict=True)
    return {column: value for column, value in named if not math.isnan(value)}


def baseline_of(arms: Sequence[str], wanted: str | None) -> str | None:
    """Find the baseline arm by full label or by experiment; by default `BASELINE`, if it is one of several arms.

    Raises ConfigError if `wanted` names no arm or several.
    """
    name = wanted or BASELINE
    fits = [arm for arm in arms if arm == name] or [arm for arm in arms if arm.partition(" (")[0] == name]
    if wanted is None:
        return fits[0] if len(fits) == 1 and len(arms) > 1 else None
    if len(fits) == 1:
        return fits[0]
    what = "is several arms" if fits else "is none of the arms"
    hint = did_you_mean(wanted, list(arms))
    raise ConfigError(f"baseline={wanted} {what}.{hint} Allowed: {'; '.join(fits or arms)}. Type one, in quotes.")


def text(comparison: Comparison, arms: pd.DataFrame, baseline: str | None) -> str:
    """Format a comparison for the terminal: the arms, the settings in which they differ, and what was left out."""
    head = ["arm", "seeds", "finished", "before", "after", "gain", f"after - {baseline}", "policy entropy, nats"]
    rows = [head if baseline else [*head[:6], head[7]]]
    for row in arms.to_dict("records"):
        cells = [row["arm"], str(row["seeds"]), f"{row['seeds']} of {row['runs']}"]
        cells += [_format_mean(row, f"accuracy_{phase}", ".3f") for phase in ("before", "after")]
        cells += [_format_mean(row, name, "+.3f") for name in ("gain", *["difference"][: baseline is not None])]
        rows.append([*cells, f"{row['entropy_first']:.3f} -> {row['entropy_last']:.3f}"])
    differ = tabulate_differing_settings(comparison)
    parts = [columns(rows), HOW_TO_READ, columns(differ) if differ else ""]
    if baseline is not None:
        parts += [_note_undeclared_settings(comparison, baseline), _note_shared_seeds(comparison, baseline)]
    parts += notes(comparison)
    if baseline is None and len(comparison.arms) > 1:
        parts.append(f"No arm is {BASELINE}: type baseline=ARM for differences.")
    return "\n\n".join(part for part in [*parts, list_left_out(comparison)] if part)


def list_left_out(comparison: Comparison) -> str:
    """List the runs that do not count, each with the reason; empty if there are none."""
    lines = comparison.left_out
    return "\n  ".join([f"Left out, {len(lines)} in all:", *lines]) if lines else ""


def _note_undeclared_settings(comparison: Comparison, baseline: str) -> str:
    """Name settings that differ from the baseline although no experiment declares them; empty if none."""
    base, arms = comparison.arms[baseline][0].run, Counter[str]()
    for run in (records[0].run for records in comparison.arms.values()):
        arms.update(key for key in differing_keys([run, base]) if key not in run.declared | base.declared)
    listed = ", ".join(f"{key} ({count} arm{'s' * (count != 1)})" for key, count in sorted(arms.items()))
    return f"after - {baseline} also reflects settings no experiment declares: {listed}." if arms else ""


def _note_shared_seeds(comparison: Comparison, baseline: str) -> str:
    """Say how many seeds each arm shares with the baseline; empty if every arm has the baseline's seeds."""
    seeds = {label: {record.run.seed for record in records} for label, records in comparison.arms.items()}
    both = {label: len(own & seeds[baseline]) for label, own in seeds.items() if own != seeds[baseline]}
    listed = ", ".join(f"{label}: {count}" for label, count in both.items())
    return f"after - {baseline} uses only seeds that both arms have; {listed}." if both else ""


def notes(comparison: Comparison) -> list[str]:
    """List warnings about runs that their settings do not show: other machines, code, questions, damaged records."""
    records = comparison.counted
    notes = _note_origins(records)
    if len(tasks := sorted({record.run.value(TASK) for record in records})) > 1:
        notes.append(f"The runs are of {len(tasks)} tasks, {', '.join(tasks)}: compare arms of one task.")
    if mixed := [key for key in differing_keys([record.run for record in records]) if key in CONDITIONS]:
        notes.append(f"The arms differ in conditions ({', '.join(mixed)}): compare arms of one.")
    parts = {task_of(record.run) for record in records if task_of(record.run) != record.run.value(TASK)}
    notes += [f"The questions are of {part}: no accuracy here is that of the whole set." for part in sorted(parts)]
    if (most := max((record.at_once for record in records), default=1)) > 1:
        others = "another" if most == 2 else f"up to {most - 1} others"
        notes.append(f"Runs ran beside {others}: seconds and tokens/s are of shared machines, and left out.")
    hashless = [record.run for record in records if record.run.value(CONTENT) == ABSENT]
    if count := sum(run.value(PLACE).startswith("/") for run in hashless):  # two local models at one path look equal
        notes.append(
            f"model.hash is not known of {count} run{'s' * (count != 1)}, which an older version began: two models "
            "that lay under one path would count as one arm."
        )
    if len({frozenset(record.accuracy["after"].index) for record in records if record.accuracy}) > 1:
        notes.append("Not all runs were asked the same questions; a row is over those that all of its runs were asked.")
    if damaged := len(comparison.damaged):
        notes.append(
            f"The record of {damaged} run{'s' * (damaged != 1)} is damaged: put its files back as they were, or type "
            "rerun=true with the line that began it."
        )
    return notes


def _note_origins(records: Sequence[Record]) -> list[str]:
    """List a warning if runs come from several machines, package versions, commits or sets of questions."""
    notes = []
    kinds = {"machines": [record.origin.machine for record in records]}
    for package in sorted({name for record in records for name in record.origin.versions}):
        kinds[f"versions of {package}"] = [record.origin.versions.get(package, "") for record in records]
    for what, texts in kinds.items():
        if len(several := sorted(set(texts) - {""})) > 1:
            notes.append(f"The runs ran on {len(several)} {what}: {'; '.join(several)}.")
    if len(codes := sorted({record.run.code for record in records})) > 1:
        notes.append(f"The runs come from {len(codes)} versions of the code: {', '.join(codes)}.")
    if (sets := len({record.origin.training_sha256 for record in records} - {""})) > 1:
        notes.append(f"The runs were trained on {sets} different sets of questions (training_sha256 in env.json).")
    if (sets := len({record.origin.heldout_sha256 for record in records} - {""})) > 1:
        notes.append(
            f"The runs were asked {sets} different sets of held-out questions (heldout_sha256 in env.json), which are "
            "paired by id."
        )
    return notes


def _format_mean(row: dict[str, Any], name: str, form: str) -> str:
    """Format a mean of a row as `0.768 [0.731, 0.805]`, without an interval if there is none; a dash without a mean."""
    mean, low, high = (row.get(f"{name}{end}", math.nan) for end in ("", "_low", "_high"))
    if math.isnan(mean) or math.isnan(high):
        return "-" if math.isnan(mean) else format(mean, form)
    return f"{mean:{form}} {format_interval(low, high, f'{{:{form}}}'.format)}"


def tabulate_differing_settings(comparison: Comparison) -> list[list[str]]:
    """Tabulate the settings in which arms differ, a row per arm below a head; empty if none differ."""
    firsts = {label: records[0].run for label, records in comparison.arms.items()}
    keys = differing_keys(list(firsts.values()))
    rows = [[label, *(shorten(run.value(key)) for key in keys)] for label, run in firsts.items()]
    return [["arms differ in", *keys], *rows] if keys else []


def curves(comparison: Comparison) -> pd.DataFrame:
    """Return all kept metrics of the runs that count as tidy rows: run_id, arm, metric, step, seconds, value.

    `seconds` is the time of the run's training steps up to and including this one.
    """
    frames = []
    for record in comparison.counted:
        seconds = record.steps["step/seconds"].astype("float64").fillna(0).cumsum()
        tidy = record.steps.melt(var_name="metric", ignore_index=False).reset_index()
        name = record.run.name
        tidy = tidy.assign(seconds=tidy["step"].map(seconds), run_id=name, arm=comparison.arm_of[name])
        frames.append(tidy[["run_id", "arm", "metric", "step", "seconds", "value"]])
    return pd.concat(frames, ignore_index=True)


def format_csv(table: pd.DataFrame) -> str:
    """Format a table as CSV text with six significant digits."""
    return table.to_csv(index=False, float_format="%.6g")
