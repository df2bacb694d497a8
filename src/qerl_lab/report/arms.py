"""Group runs into arms: match runs across machines, choose those that count, and label each arm. Pure."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import pandas as pd

from qerl_lab.config.conf_folder import matching_option
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.task import subset_in_words
from qerl_lab.report.runs import ABSENT, Arm, Run, normalize

NO_EXPERIMENT = RunConfig().experiment
CHOICES = ("algorithm", "aqn")  # groups of conf/ in which one choice sets several keys
OF_A_SCALE = 4  # a label names the scale instead of the keys that follow from it if there are at least so many
LONGEST = 48  # most characters of a value in a label; the longest path to the embedded policy has 41


# --- which records are of one run, and which runs of one arm


def match_task_paths(runs: Sequence[Run]) -> list[Run]:
    """Rewrite task.path, so that runs of one task agree in it exactly if they were asked the same questions.

    Runs belong to one arm if their settings agree, but the same questions may have another path on another machine, and
    other questions the same path.

    1. Runs with equal questions get the path that comes first in `runs`.
    2. If runs with equal `task.*` settings had different questions, a hash of the questions is added to each path.

    Questions are equal if the SHA-256 of training and held-out questions are. Older records lack the second, which is
    taken from runs with the same training questions. A run that failed before it recorded any hash counts with the runs
    of its path and `task.*` settings. Nothing is taken from runs that disagree.
    """
    tasks = [{key: text for key, text in run.settings.items() if key.startswith("task.")} for run in runs]
    table = pd.DataFrame({
        "path": [run.value("task.path") for run in runs],
        "task": [str(sorted((task | {"task.path": ""}).items())) for task in tasks],
        "training": [run.origin.training_sha256 for run in runs],
        "heldout": [run.origin.heldout_sha256 for run in runs],
    }, dtype=str)  # fmt: skip
    table["heldout"] = _fill_gaps(table, "heldout", ["training"])
    table["asked"] = (table["training"] + "/" + table["heldout"]).where(table["training"] != "", "")
    table["asked"] = _fill_gaps(table, "asked", ["task", "path"])
    known = table[table["asked"] != ""]
    paths = known.groupby("asked")["path"].transform("first")
    is_ambiguous = known["asked"].groupby([known["task"], paths]).transform("nunique") > 1
    hashes = known["asked"].map(lambda asked: hashlib.sha256(asked.encode()).hexdigest()[:6])
    paths = paths.where(~is_ambiguous, paths + " #" + hashes)
    return [
        replace(run, settings={**run.settings, "task.path": paths[index]}) if index in paths.index else run
        for index, run in enumerate(runs)
    ]


def _fill_gaps(table: pd.DataFrame, column: str, keys: list[str]) -> pd.Series:
    """Return `column`, with its empty cells filled from the rows that have equal values in the columns `keys`.

    A cell stays empty if those rows have different texts, or none.
    """
    texts = table[column].where(table[column] != "")  # NaN, which the groups leave out
    groups = texts.groupby([table[key] for key in keys])
    agreed = groups.transform("first").where(groups.transform("nunique") == 1, "")
    return table[column].where(table[column] != "", agreed)


def fill_in_device(runs: Sequence[Run]) -> list[Run]:
    """Replace device=auto, which runs that failed early still record, by cpu or cuda.

    A run gets the device that gives it the arm of another run in `runs`; it keeps device=auto if both or neither do.
    """
    known, found = {run.arm for run in runs}, []
    for run in runs:
        if run.value("device") == "auto":
            kinds = (replace(run, settings=normalize({**run.settings, "device": kind})) for kind in ("cpu", "cuda"))
            fitting = [moved for moved in kinds if moved.arm in known]
            run = fitting[0] if len(fitting) == 1 else run
        found.append(run)
    return found


def run_key(run: Run) -> tuple[object, ...]:
    """Return a key that is equal for all records of one run, on any machine: arm, seed and start time.

    The run's name replaces a start time that is not recorded.
    """
    return run.arm, run.seed, run.origin.began or run.name


def drop_copies(runs: Sequence[Run]) -> list[Run]:
    """Keep one record of each run: the finished record if there is one, else the record that ended last.

    A run has several records if it stopped on one machine and was resumed on another.
    """
    furthest = {run_key(run): run for run in sorted(runs, key=lambda run: (run.is_finished, run.ended))}
    return [run for run in runs if furthest[run_key(run)] is run]


def count_overlaps(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with `at_once` set: the largest number of runs at one time on the machine, the run included.

    `at_once` is the larger of two numbers: overlaps by the times at which the runs worked (`Run.worked`), and the N of
    jobs=N or jobs_per_gpu=N in the command of the run or its sweep file. Two runs share a machine if they share a GPU
    or, without GPUs, a host. Older records name only the kind of machine. Then only N counts if there is one; otherwise
    all machines of one kind count as one machine.
    """
    places, allowed = list[set[str]](), list[int]()
    for run in runs:
        option = "jobs" if run.value("device") == "cpu" else "jobs_per_gpu"
        options = re.findall(rf"\b{option}=(\d+)", f"{run.origin.command} {run.origin.configured}")
        known = set(run.origin.place.split())
        if not known and not options and run.origin.machine:  # an older record
            known = {run.origin.machine}
        places.append(known)
        allowed.append(max(map(int, options), default=1))
    worked, counted = [run.worked() for run in runs], list[Run]()
    for run, place, own_spans, most in zip(runs, places, worked, allowed, strict=True):
        here = [span for spans, at in zip(worked, places, strict=True) if place & at for span in spans]
        for (begin, end), (first, last) in product(own_spans, here):
            if first < end and begin < last:
                moment = max(begin, first)  # when they begin to overlap; the most runs at once work at such a moment
                most = max(most, sum(start <= moment < stop for start, stop in here))
        counted.append(replace(run, at_once=most))
    return counted


def choose_runs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the runs that count, and a line `NAME: REASON` for each other run.

    A run counts if it is the newest finished run of its arm and seed. The runs that count are sorted by experiment,
    settings and seed.
    """
    counted: dict[tuple[Arm, int], Run] = {}
    left_out = [f"{run.name}: {run.status}" for run in runs if not run.is_finished]
    finished = [run for run in runs if run.is_finished]
    for run in sorted(finished, key=lambda run: run.ended):
        if older := counted.get((run.arm, run.seed)):
            left_out.append(f"{older.name}: repeated by {run.name}, with the same settings and seed")
        counted[run.arm, run.seed] = run
    keys = differing_keys(list(counted.values()))
    chosen = sorted(
        counted.values(), key=lambda run: (run.experiment, *(number_first(run.value(key)) for key in keys), run.seed)
    )
    return chosen, left_out


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """List the keys of settings in which the runs differ, sorted, without a redundant model.path or model.hash.

    The hash is redundant if each path has one hash and each hash one path, because readers know the path. Otherwise the
    path is redundant if all hashes are known and equal.
    """
    pairs = {(run.value("model.path"), run.value("model.hash")) for run in runs}
    paths, hashes = {path for path, _ in pairs}, {found for _, found in pairs}
    redundant = "model.path" if len(hashes) == 1 and ABSENT not in hashes else None
    if len(paths) == len(hashes) == len(pairs):
        redundant = "model.hash"
    known = sorted({key for run in runs for key in run.settings} - {redundant})
    return [key for key in known if len({run.value(key) for run in runs}) > 1]


# --- what an arm is called


def labels(runs: Sequence[Run]) -> dict[Arm, str]:
    """Map each arm to its label in tables: `EXPERIMENT (key=value, ...)`, or only one of the two parts.

    A label shows only settings in which `runs` differ, without those that follow from the task's name. It shows a
    setting that the experiment declares (`Run.declared`) only if runs of the experiment differ in it. It shows any
    other setting only if at most half of the runs that do not declare it have the same value. The settings of a group
    in `CHOICES` appear as one choice, such as `aqn=linear`.

    If `keys_of_scales` finds keys, a label begins with `scale=NAME`, and the rest is as if there were only the runs of
    that scale.
    """
    if not keys_of_scales(runs):
        return {arm: _format_label(*parts) for arm, parts in _parts_of_labels(runs).items()}
    found, scale_of = dict[Arm, str](), scale_by_arm(runs)
    for scale in sorted(set(scale_of.values())):
        parts = _parts_of_labels([run for run in runs if scale_of[run.arm] == scale])
        found |= {arm: _format_label(name, [f"scale={scale}", *words]) for arm, (name, words) in parts.items()}
    return found


def representative_of(labels: Sequence[str], runs_of: Mapping[str, Sequence[Run]]) -> str | None:
    """Choose one of `labels`, which fit a request equally, to represent all of them; None if no choice is clear.

    This is the arm labeled by its experiment's name alone. If there is none, it is the arm with the values that most
    arms of `runs_of` have in the settings in which `labels` differ. The choice does not depend on results.
    """
    alone = [label for label in labels if label == runs_of[label][0].experiment]
    if len(alone) == 1:
        return alone[0]
    keys = differing_keys([runs_of[label][0] for label in labels])
    values = {label: tuple(runs[0].value(key) for key in keys) for label, runs in runs_of.items()}
    arms_with = Counter(values.values())
    most = max((arms_with[values[label]] for label in labels), default=0)
    found = [label for label in labels if arms_with[values[label]] == most]
    return found[0] if len(found) == 1 else None


def keys_of_scales(runs: Sequence[Run]) -> list[str]:
    """List the keys that follow from a run's scale (`conf/scale`): they differ, but have one value in each scale.

    Empty if the runs have one scale, or if the scale of a run is not known. Also empty if there are fewer than
    `OF_A_SCALE` keys, because a label then says more by the keys themselves.
    """
    scale_of = scale_by_arm(runs)
    count = len(set(scale_of.values()))
    if "" in scale_of.values():
        return []
    keys = [key for key in differing_keys(runs) if len({(scale_of[run.arm], run.value(key)) for run in runs}) == count]
    return keys if len(keys) >= OF_A_SCALE else []


def scale_by_arm(runs: Sequence[Run]) -> dict[Arm, str]:
    """Map each arm to the scale (`conf/scale`) of the last of `runs` in it; "" if that is not known."""
    return {run.arm: run.configured.get("scale", "") for run in runs}


def _format_label(name: str, settings: Sequence[str]) -> str:
    """Format a label from the name of its experiment, which may be empty, and its settings."""
    text = ", ".join(settings)
    return f"{name} ({text})" if name and text else name or text or NO_EXPERIMENT


def _parts_of_labels(runs: Sequence[Run]) -> dict[Arm, tuple[str, list[str]]]:
    """Map each arm to the name of its experiment, "" if it has none, and to the settings in its label."""
    found = dict[Arm, tuple[str, list[str]]]()
    implied, differ = keys_implied_by_task([run.settings for run in runs]), differing_keys(runs)

    def is_needed(key: str, run: Run) -> bool:
        """Tell whether the label of a run's arm must show the setting `key`."""
        undeclared = [other.value(key) for other in runs if key not in other.declared]
        if key in run.declared or len(set(undeclared)) == 1:
            return len({other.value(key) for other in runs if other.experiment == run.experiment}) > 1
        return 2 * undeclared.count(run.value(key)) <= len(undeclared)

    last_run, names = dict[Arm, Run](), dict[Arm, set[str]]()  # by arm; one pass, because `Run.arm` sorts all settings
    for run in runs:
        last_run[run.arm] = run
        names.setdefault(run.arm, set()).add(run.experiment)
    for arm, run in last_run.items():
        keys = [key for key in differ if key not in implied and is_needed(key, run)]
        words = {key: format_setting(key, run.value(key)) for key in keys}
        if "task.module_hash" in keys:
            words["task.module_hash"] = _format_module(run, runs)
        for group in CHOICES:
            of_group = [key for key in differ if key.startswith(f"{group}.")]
            replaced = [key for key in of_group if key in keys]
            choice = matching_option(group, run.settings, of_group) if replaced else None
            if choice is not None:
                for key in replaced:
                    del words[key]
                words[replaced[0]] = f"{group}={choice}"
        found[arm] = " = ".join(sorted(names[arm] - {NO_EXPERIMENT})), [words[key] for key in sorted(words)]
    return found


def _format_module(run: Run, runs: Sequence[Run]) -> str:
    """Format the user's file of a run as `task.module=FILE.py`, with its hash if files of that name differ in `runs`.

    Without a file the text is `task.module=None`; in older results, which lack the name, it is the hash alone.
    """
    own_hash, name = run.value("task.module_hash"), run.configured.get("task.module")
    if own_hash == "None":
        return "task.module=None"
    if name is None:
        return format_setting("task.module_hash", own_hash)
    contents = {other.value("task.module_hash") for other in runs if other.configured.get("task.module") == name}
    return f"task.module={shorten(name)}" + (f" #{own_hash[:6]}" if len(contents) > 1 else "")


def keys_implied_by_task(settings: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the `task.*` keys that have the same value in all runs of one task, so that task.name implies them."""
    names = {of_run.get("task.name") for of_run in settings}
    keys = {key for of_run in settings for key in of_run if key.startswith("task.") and key != "task.name"}
    pairs_of = {key: {(of_run.get("task.name"), of_run.get(key)) for of_run in settings} for key in keys}
    return {key for key, pairs in pairs_of.items() if len(pairs) == len(names)}


def task_of(run: Run) -> str:
    """Return the name of a run's task, such as `gsm8k`; for a subset of questions `gsm8k with at most 2 steps`."""
    name, most = run.value("task.name"), run.value("task.gsm8k.max_steps")
    return name + subset_in_words(name, int(most) if most.isdigit() else None)


def format_setting(key: str, value: str) -> str:
    """Format a setting as `key=value` for a label, with a long value shortened.

    task.name appears as `task`, and lora.rank=0 as `lora=full`.
    """
    if (key, value) == ("lora.rank", "0"):
        return "lora=full"
    name = "task" if key == "task.name" else key
    return f"{name}={shorten(value)}"


def shorten(value: str) -> str:
    """Shorten a value of more than `LONGEST` characters, and add a hash of the whole value so that labels stay unique.

    A value with spaces keeps its beginning. Any other value, such as a path, keeps its end.
    """
    if len(value) <= LONGEST:
        return value
    mark, kept = hashlib.sha256(value.encode()).hexdigest()[:6], LONGEST - 12
    return f"{value[:kept].rstrip()}... #{mark}" if " " in value else f"...{value[-kept:]} #{mark}"


def number_first(text: str) -> tuple[bool, float, str]:
    """Return a sort key for text: numbers come first, from low to high, then other text by alphabet."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text
