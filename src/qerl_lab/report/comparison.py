"""Compare arms: choose the runs that count, build a row per arm, and format the report for the terminal."""

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_lab.config.message import first_and_last, with_noun
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.report import arms, results
from qerl_lab.report.arms import differing_keys, keys_of_scales, scale_by_arm, task_of
from qerl_lab.report.measures import any_shared_machine
from qerl_lab.report.runs import ABSENT, Run
from qerl_lab.report.stats import CHANGE, NO_SPREAD, SHARE, format_change, mean_of_arm
from qerl_lab.report.table import NONE, Rows, seeds_cell
from qerl_lab.system.terminal import columns

BASELINE = "bf16"  # the default baseline
# Settings that limit what a verdict is about. `notes` warns if the arms of a comparison differ in one of them.
CONDITIONS = (
    "model.path", "model.hash", "rollout.importance_correction", "rollout.temperature", "eval.temperature",
    "optim.learning_rate", "algorithm.updates_per_rollout",
)  # fmt: skip
ABOUT_INTERVALS = "Intervals are 95%, over seeds and questions; one seed has none."
HOW_TO_READ = f"""\
{ABOUT_INTERVALS} Intervals of two arms may overlap although the arms
differ: read the difference, which is paired by seed and question. One in 20 true differences of 0 looks real."""
ABOUT_NO_SPREAD = f"{NO_SPREAD}: neither seeds nor questions show any, perhaps by chance, so there is no interval."


@dataclass(frozen=True)
class Comparison:
    """Runs grouped into arms, and the reasons why other runs do not count.

    `arms` maps the label of an arm to its runs that count. `runs` has every readable run. `damaged` maps the name of an
    unreadable run to the reason. `left_out` has a line `NAME: REASON` for each run that does not count.
    """

    arms: dict[str, list[Run]]
    runs: list[Run]
    damaged: dict[str, str]
    left_out: list[str]

    @property
    def counted(self) -> list[Run]:
        """Return the runs that count (the newest finished run of each arm and seed), arm by arm."""
        return [run for runs in self.arms.values() for run in runs]

    @property
    def started(self) -> dict[str, int]:
        """Map the label of each arm to its number of runs that count or did not finish."""
        unfinished = Counter(run.arm for run in self.runs if not run.is_finished)
        return {label: len(runs) + unfinished[runs[0].arm] for label, runs in self.arms.items()}

    @property
    def arm_of(self) -> dict[str, str]:
        """Map the name of each run that counts to the label of its arm."""
        return {run.name: label for label, runs in self.arms.items() for run in runs}

    @property
    def alone(self) -> dict[str, list[Run]]:
        """Return the arms in which no run shared its machine, so that seconds and tokens/s are comparable."""
        return {label: runs for label, runs in self.arms.items() if not any_shared_machine(runs)}


def read(folders: Sequence[Path]) -> Comparison:
    """Read all runs below `folders`, which hold run directories or results of a report, and group them into arms.

    Raises ConfigError, with a reason for each run, if none is finished and intact.
    """
    compared = compare(*results.read_all(folders))
    if not compared.arms:
        raise ConfigError("no run counts:\n  " + "\n  ".join(compared.left_out or ["there is none"]))
    return compared


def compare(runs: list[Run], damaged: dict[str, str]) -> Comparison:
    """Choose the runs that count and group them into arms; `damaged` maps each unreadable run to the reason.

    The newest finished run of each arm and seed counts.
    """
    runs = arms.count_overlaps(arms.drop_copies(arms.fill_in_device(arms.match_task_paths(runs))))
    counted, left_out = arms.choose_runs(runs)
    labels, runs_by_label = arms.labels(counted), dict[str, list[Run]]()
    for run in counted:
        runs_by_label.setdefault(labels[run.arm], []).append(run)
    return Comparison(runs_by_label, runs, damaged, [*left_out, *(f"{name}: {why}" for name, why in damaged.items())])


# --- tables


def by_arm(comparison: Comparison, baseline: str | None) -> pd.DataFrame:
    """Tabulate the arms, a row each: counts of seeds, runs and questions, means over seeds, and the code's commits.

    Accuracies, gain and differences have 95% intervals, in columns that end in `_low` and `_high`. Differences are to
    the arm `baseline`, over the seeds and questions that both arms have.
    """
    rows = []
    for label, runs in comparison.arms.items():
        means = {
            "accuracy_before": mean_of_arm(accuracy_matrix(runs, "before"), SHARE),
            "accuracy_after": mean_of_arm(accuracy_matrix(runs, "after"), SHARE),
            "gain": mean_of_arm(accuracy_matrix(runs, "gain"), CHANGE),
        }
        if baseline is not None and label != baseline:
            for phase, name, most in (("after", "difference", 1), ("gain", "gain_difference", 2)):
                differences = accuracy_matrix(runs, phase) - accuracy_matrix(comparison.arms[baseline], phase)
                means[name] = mean_of_arm(differences, (-most, most))
        row: dict[str, Any] = {
            "arm": label,
            "seeds": len(runs),
            "runs": comparison.started[label],
            "questions": accuracy_matrix(runs, "after").shape[1],
        }
        for name, interval in means.items():
            ends = zip(("", "_low", "_high"), interval, strict=True)
            row |= {f"{name}{end}": value for end, value in ends if not math.isnan(value)}
        for name in ("entropy_first", "entropy_last"):
            row[name] = float(np.mean([run.summary[name] for run in runs]))
        rows.append(row | {"code": ", ".join(sorted({run.code for run in runs}))})
    return pd.DataFrame(rows)


def accuracy_rows(comparison: Comparison, baseline: str | None) -> Rows:
    """Tabulate held-out accuracy as text: a head, then a row of cells per arm, with the number of seeds in brackets.

    With a `baseline`, the label of an arm, the last column is the difference to it, over the seeds that both arms have.
    """
    rows = [["arm", "finished", "before", "after", "gain", *([f"after - {baseline}"] if baseline else [])]]
    for label, runs in comparison.arms.items():
        cells = [label, f"{len(runs)} of {comparison.started[label]}"]
        cells += [seeds_cell(accuracy_matrix(runs, phase), SHARE) for phase in ("before", "after")]
        cells.append(seeds_cell(accuracy_matrix(runs, "gain"), CHANGE, format_change))
        if baseline is not None:
            difference = accuracy_matrix(runs, "after") - accuracy_matrix(comparison.arms[baseline], "after")
            cells.append(NONE if label == baseline else seeds_cell(difference, CHANGE, format_change))
        rows.append(cells)
    return rows


def accuracy_matrix(runs: Sequence[Run], phase: str) -> pd.DataFrame:
    """Return held-out accuracy or gain of an arm [seeds, questions]; `phase` is "before", "after" or "gain".

    Only questions that every seed answered have a column. Runs without evaluation have no row.
    """
    return pd.DataFrame({run.seed: run.accuracy[phase] for run in runs if run.accuracy}).T.dropna(axis=1)


def tabulate_differing_settings(comparison: Comparison, head: str) -> list[list[str]]:
    """Tabulate the settings in which arms differ: a row per arm with its label and its values.

    The first row has `head` (the text above the labels) and the keys. Leaves out the keys of `tabulate_scales`. Returns
    an empty list if the arms differ in no other.
    """
    firsts = {label: runs[0] for label, runs in comparison.arms.items()}
    of_scales = set(keys_of_scales(comparison.counted))
    keys = [key for key in differing_keys(list(firsts.values())) if key not in of_scales]
    rows = [[label, *(arms.shorten(run.value(key)) for key in keys)] for label, run in firsts.items()]
    return [[head, *keys], *rows] if keys else []


def tabulate_scales(comparison: Comparison, head: str) -> list[list[str]]:
    """Tabulate the settings that follow from the scale of the runs: a row per key, a column per scale.

    The first row has `head` (the text above the keys) and the scales as in the labels. Returns an empty list if the
    labels name no scale (`arms.keys_of_scales`).
    """
    scale_of = scale_by_arm(comparison.counted)
    runs = {scale_of[run.arm]: run for run in comparison.counted}
    scales, keys = sorted(runs), keys_of_scales(comparison.counted)
    rows = [[key, *(arms.shorten(runs[scale].value(key)) for scale in scales)] for key in keys]
    return [[head, *scales], *rows] if keys else []


# --- the text of the report


def baseline_of(runs_of: Mapping[str, Sequence[Run]], wanted: str | None) -> str | None:
    """Return the label of the baseline among the arms `runs_of`, which maps labels to runs.

    `wanted` is a full label or the name of an experiment; `arms.representative_of` chooses among arms of that name. If
    `wanted` is None, `BASELINE` is looked for, and the result is None if there is one arm only, or no such baseline.
    Raises ConfigError if a given `wanted` fits no arm or several.
    """
    name = wanted or BASELINE
    fits = [name] if name in runs_of else [label for label in runs_of if label.partition(" (")[0] == name]
    found = arms.representative_of(fits, runs_of)
    if wanted is None:
        return found if len(runs_of) > 1 else None
    if found is not None:
        return found
    what = "is several arms" if fits else "is none of the arms"
    hint = did_you_mean(wanted, [*dict.fromkeys(label.partition(" (")[0] for label in runs_of), *runs_of])
    raise ConfigError(f"baseline={wanted} {what}.{hint} Allowed: {'; '.join(fits or runs_of)}. Type one, in quotes.")


def text(comparison: Comparison, baseline: str | None) -> str:
    """Format a comparison for the terminal: arms, settings in which they differ, warnings, and runs left out.

    With a `baseline`, the label of an arm, there are differences to it.
    """
    rows = accuracy_rows(comparison, baseline)
    rows[0].append("policy entropy, nats")
    for row, runs in zip(rows[1:], comparison.arms.values(), strict=True):
        first, last = (float(np.mean([run.summary[f"entropy_{when}"] for run in runs])) for when in ("first", "last"))
        row.append(first_and_last(first, last, max(run.summary["steps"] for run in runs)))
    how_to_read = f"Cells: mean [interval] (seeds).\n{HOW_TO_READ if len(comparison.arms) > 1 else ABOUT_INTERVALS}"
    if any(NO_SPREAD in cell for row in rows for cell in row):
        how_to_read += f"\n{ABOUT_NO_SPREAD}"
    parts = [columns(rows), how_to_read]
    if scales := tabulate_scales(comparison, "scales differ in"):
        parts.append(columns(scales))
    if differ := tabulate_differing_settings(comparison, "arms differ in"):
        parts.append(columns(differ))
    if baseline is not None:
        base, undeclared = comparison.arms[baseline][0], Counter[str]()  # key -> number of arms that differ in it
        for first_run, *_ in comparison.arms.values():
            undeclared.update({*differing_keys([first_run, base])} - first_run.declared - base.declared)
        if undeclared:
            named = ", ".join(f"{key} ({with_noun(count, 'arm')})" for key, count in sorted(undeclared.items()))
            parts.append(
                f"Arms also differ from {baseline} in keys that no experiment sets, which after - {baseline} reflects: "
                f"{named}."
            )
    parts += [*notes(comparison), describe_no_baseline(comparison, baseline), list_left_out(comparison)]
    return "\n\n".join(part for part in parts if part)


def describe_no_baseline(comparison: Comparison, baseline: str | None) -> str:
    """Say that no arm or several arms are the default baseline, and what to type to choose one.

    The text is empty if there is a baseline, or only one arm.
    """
    if baseline is not None or len(comparison.arms) < 2:
        return ""
    fits = [label for label in comparison.arms if label.partition(" (")[0] == BASELINE]
    label = shlex.quote(next(iter(fits or comparison.arms)))
    return (
        f"{'Several arms are' if fits else 'No arm is'} {BASELINE}: for differences type for example baseline={label}."
    )


def list_left_out(comparison: Comparison) -> str:
    """List the runs that the comparison leaves out, a line each with the reason; an empty string if there are none."""
    lines = comparison.left_out
    return "\n  ".join([f"Left out, {len(lines)} in all:", *lines]) if lines else ""


def notes(comparison: Comparison) -> list[str]:
    """List, as sentences, what may spoil a comparison, such as mixed machines, versions, questions or conditions."""
    runs, sentences = comparison.counted, list[str]()

    def several(texts: Iterable[str]) -> list[str]:
        """Return the distinct texts, sorted, or none if there is only one. `texts` has one per run, "" if unknown."""
        found = sorted({*texts} - {""})
        return found if len(found) > 1 else []

    if machines := several(run.origin.machine for run in runs):
        sentences.append(f"The runs ran on {len(machines)} kinds of machines: {'; '.join(machines)}.")
    for name in sorted({name for run in runs for name in run.origin.versions}):
        if versions := several(run.origin.versions.get(name, "") for run in runs):
            sentences.append(f"The runs ran on {len(versions)} versions of {name}: {'; '.join(versions)}.")
    if codes := several(run.code for run in runs):
        sentences.append(f"The runs come from {len(codes)} versions of the code: {', '.join(codes)}.")
    if trained := several(run.origin.training_sha256 for run in runs):
        sets = f"{len(trained)} different sets of questions (training_sha256 in env.json)"
        sentences.append(f"The runs were trained on {sets}.")
    if asked := several(run.origin.heldout_sha256 for run in runs):
        sets = f"{len(asked)} different sets of held-out questions (heldout_sha256 in env.json)"
        sentences.append(f"The runs were asked {sets}, which are paired by id.")
    for path in sorted({run.value("model.path") for run in runs}):
        if held := several(run.origin.hub_model_hash for run in runs if run.value("model.path") == path):
            sentences.append(f"{path} was {len(held)} different models, since it changed on the hub (env.json).")
    if tasks := several(run.value("task.name") for run in runs):
        sentences.append(f"The runs are of {len(tasks)} tasks, {', '.join(tasks)}: compare arms of one task.")
    if mixed := [key for key in differing_keys(runs) if key in CONDITIONS]:
        sentences.append(f"The arms differ in conditions ({', '.join(mixed)}): compare arms of one.")
    parts = {task_of(run) for run in runs if task_of(run) != run.value("task.name")}
    sentences += [f"The questions are of {part}: no accuracy here is that of the whole set." for part in sorted(parts)]
    if shared := [run.at_once for run in runs if run.at_once > 1]:
        some = "Runs" if len(shared) == len(runs) else f"{len(shared)} of {len(runs)} runs"
        others = "another" if max(shared) == 2 else f"up to {max(shared) - 1} others"
        sentences.append(f"{some} ran beside {others}: seconds and tokens/s are of shared machines, and left out.")
    # without a hash, two local models that lay at one path look equal
    if count := sum(run.value("model.hash") == ABSENT and run.value("model.path").startswith("/") for run in runs):
        sentences.append(
            f"model.hash is not known of {with_noun(count, 'run')}, which an older version began: two models "
            "that lay under one path would count as one arm."
        )
    if len({frozenset(run.accuracy["after"].index) for run in runs if run.accuracy}) > 1:
        sentences.append(
            "Not all runs were asked the same questions; a row is over those that all of its runs were asked."
        )
    if damaged := len(comparison.damaged):
        sentences.append(
            f"The record of {with_noun(damaged, 'run')} is damaged; the runs left out have the reason and what to do. "
            "To make the runs of a sweep again, type the line that began it with hydra.sweep.dir=DIR."
        )
    return sentences
