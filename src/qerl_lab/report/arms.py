"""Arms: the runs that are one, those of them that count, and the name that tells it from others. Pure.

Runs are of one arm if they share every setting but those that `arm.is_of_arm` leaves out, and ran on one kind of
device. The name `experiment` decides nothing: it is where a label begins.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from qerl_lab.config.arm import acting, by_content, completed, is_of_arm
from qerl_lab.config.choices import choice_with
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.task import part_of

FINISHED = "finished"
COPIED = "copied"  # how the status of a copy begins; `copies` tells which are
PLACE, CONTENT = "model.path", "model.hash"
QUESTIONS = "task.path"
ABSENT = "(absent)"  # what stands for a setting that a run lacks
TASK = "task.name"
NO_EXPERIMENT = RunConfig().experiment
CHOICES = ("algorithm", "aqn")  # groups of conf/ whose choices set several keys at once
LONGEST = 48  # characters of a value in a label; the pocket's longest path has 41
Arm = tuple[tuple[str, str], ...]  # the settings that make it, sorted
RENAMED = {"bf16_hot": "bf16_temperature", "bf16_bonus": "bf16_entropy_bonus"}  # arms as earlier runs were called


@dataclass(frozen=True)
class Run:
    """A run by what tells it from others.

    `settings` are the dotted keys that make its arm, as text, and model.path in any case; `declared` the keys in which
    its experiment is meant to differ from others (`differs_in`); `status` is `FINISHED` or says what it is instead;
    `ended` is in unix seconds.
    """

    name: str
    experiment: str  # as conf/experiment/ calls it now
    seed: int
    settings: Mapping[str, str] = field(hash=False)
    declared: frozenset[str]
    status: str
    ended: float
    code: str

    @property
    def arm(self) -> Arm:
        return tuple(sorted(by_content(self.settings).items()))

    def value(self, key: str) -> str:
        """A setting; another version of the lab may lack it, and model.hash is of local models alone."""
        return self.settings.get(key, ABSENT)


def task_of(run: Run) -> str:
    """The task in words: its name, and which part of its questions where not all are read."""
    name, most = run.value("task.name"), run.value("task.gsm8k.max_steps")
    return name + part_of(name, int(most) if most.isdigit() else None)


def run_from(values: Mapping[str, str], *, name: str, status: str, ended: float, code: str, metrics: Collection) -> Run:
    """A run from all dotted keys of its configuration as text, and the names of the metrics that it recorded.

    Raises ValueError where the values are no configuration of this lab.
    """
    try:
        device, seed, declared = values["device"], int(values["seed"]), yaml.safe_load(values["differs_in"])
        experiment = RENAMED.get(values["experiment"], values["experiment"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"its configuration lacks {error}") from None
    if device == "auto" and metrics:  # the first GPU, where torch saw one; its peak memory is then recorded
        device = "cuda" if "memory/gpu_peak_gib" in metrics else "cpu"
    own = comparable(dict(values) | {"device": device})
    settings = {key: value for key, value in own.items() if is_of_arm(key) or key == "device"}
    if settings.get(CONTENT) == "None":  # an older record has no such key, and means the same
        del settings[CONTENT]
    return Run(name, experiment, seed, settings, frozenset(declared), status, ended, code)


def placed(runs: Sequence[Run]) -> list[Run]:
    """The runs; one that failed before it noted its device, with that of the runs it equals otherwise, if one has."""
    known, found = {run.arm for run in runs}, []
    for run in runs:
        if run.value("device") == "auto":
            kinds = (replace(run, settings=comparable({**run.settings, "device": kind})) for kind in ("cpu", "cuda"))
            there = [moved for moved in kinds if moved.arm in known]
            run = there[0] if len(there) == 1 else run
        found.append(run)
    return found


def comparable(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings of a record, or of a report's files, of whatever version, so that those of one arm are equal."""
    own = acting(completed(settings))
    if own["device"] == "cpu" and own.get("optim.packing") == "off":  # auto packs on GPUs alone
        own["optim.packing"] = "auto"
    return own


def version(git_sha: str | None, dirty: Any) -> str:
    """Name the code of a run, from its env.json or its MLflow tags."""
    return f"{(git_sha or 'unknown')[:7]}{' with changes' if dirty in (True, 'true') else ''}"


def choose(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """The newest finished run of each (arm, seed), in the order of arms and seeds; and a line on each other run."""
    counted: dict[tuple[Arm, int], Run] = {}
    left_out = [f"{run.name}: {run.status}" for run in runs if run.status != FINISHED]
    for run in sorted((run for run in runs if run.status == FINISHED), key=lambda run: run.ended):
        if older := counted.get((run.arm, run.seed)):
            left_out.append(f"{older.name}: repeated by {run.name}, with the same settings and seed")
        counted[run.arm, run.seed] = run
    keys = differing(list(counted.values()))
    return sorted(counted.values(), key=lambda run: _order(run, keys)), left_out


def started(found: Sequence[Run], counted: Sequence[Run]) -> list[Run]:
    """The runs that count or did not finish: all but copies and those that were repeated."""
    names = {run.name for run in counted}
    return [run for run in found if run.name in names or stopped(run)]


def stopped(run: Run) -> bool:
    """Whether a run did not finish, as far as is known, and is no copy of one."""
    return run.status != FINISHED and not is_copy(run)


def is_copy(run: Run) -> bool:
    return run.status.startswith(COPIED)


def differing(runs: Sequence[Run]) -> list[str]:
    """The settings whose values differ between runs, without model.path or model.hash where the other says as much."""
    known = sorted({key for run in runs for key in run.settings} - {_idle(runs)})
    return [key for key in known if len({run.value(key) for run in runs}) > 1]


def _idle(runs: Sequence[Run]) -> str | None:
    """Which of model.path and model.hash tells nothing more: the hash where each path has its own, since a reader knows
    the path; the path where all runs have one hash; None where both tell something."""
    pairs = {(run.value(PLACE), run.value(CONTENT)) for run in runs}
    places, contents = ({pair[n] for pair in pairs} for n in (0, 1))
    if len(places) == len(contents) == len(pairs):
        return CONTENT
    return PLACE if len(contents) == 1 and ABSENT not in contents else None


def labels(runs: Sequence[Run]) -> dict[Arm, str]:
    """A label for each arm: its experiment if it has one, and each setting that the experiment's name does not tell.

    A setting that more than half of the arms share, which do not declare it, goes without saying. So does one of a
    task that its name tells, as its instruction. Long values are shortened, and settings that a choice of `CHOICES`
    stands for are that choice.
    """
    arms = {run.arm: run for run in runs}
    shown: dict[Arm, list[str]] = {arm: [] for arm in arms}
    told, differ = told_by_task([run.settings for run in runs]), differing(runs)
    for key in (key for key in differ if key not in told):
        for arm in _shown_with(key, arms, runs):
            shown[arm].append(key)
    called = {arm: {run.experiment for run in runs if run.arm == arm} for arm in arms}
    return {arm: _label(called[arm], _words(run, shown[arm], differ)) for arm, run in arms.items()}


def _shown_with(key: str, arms: Mapping[Arm, Run], runs: Sequence[Run]) -> Iterator[Arm]:
    """The arms whose label needs a setting: their experiment does not tell it, and its value is not the usual one."""
    undeclared = Counter(run.value(key) for run in arms.values() if key not in run.declared)
    usual = next((value for value, count in undeclared.items() if 2 * count > undeclared.total()), None)
    for arm, run in arms.items():
        if key in run.declared or len(undeclared) == 1:
            needed = len({other.value(key) for other in runs if other.experiment == run.experiment}) > 1
        else:
            needed = run.value(key) != usual
        if needed:
            yield arm


def _label(experiments: set[str], words: Sequence[str]) -> str:
    name, settings = " = ".join(sorted(experiments - {NO_EXPERIMENT})), ", ".join(words)
    return f"{name} ({settings})" if name and settings else name or settings or NO_EXPERIMENT


def _words(run: Run, keys: Sequence[str], differ: Sequence[str]) -> list[str]:
    """The settings of `keys` as they are typed: a group's by its choice, where its choice tells all that differs."""
    words = {key: spelled(key, run.value(key)) for key in keys}
    for group in CHOICES:
        own = [key for key in keys if key.startswith(f"{group}.")]
        also = [key for key in differ if key.startswith(f"{group}.")]
        if own and (choice := choice_with(group, run.settings, also)):
            words = {key: word for key, word in words.items() if key not in own} | {own[0]: f"{group}={choice}"}
    return [words[key] for key in sorted(words)]


def told_by_task(settings: Sequence[Mapping[str, str]]) -> set[str]:
    """The keys of tasks that say no more than which task it is: each task has one value of them."""
    names = {one.get(TASK) for one in settings}
    keys = {key for one in settings for key in one if key.startswith("task.") and key != TASK}
    return {key for key in keys if len({(one.get(TASK), one.get(key)) for one in settings}) == len(names)}


def spelled(key: str, value: str) -> str:
    """A setting in a label."""
    return f"{'task' if key == TASK else key}={shortened(value)}"


def shortened(value: str) -> str:
    """A value of a label or a table: of a long text its beginning, of a long path its end, and a hash of the whole.

    The hash keeps two apart that are alike there: arms are told by their labels.
    """
    if len(value) <= LONGEST:
        return value
    mark, room = hashlib.sha256(value.encode()).hexdigest()[:6], LONGEST - 12
    return f"{value[:room].rstrip()}... #{mark}" if " " in value else f"...{value[-room:]} #{mark}"


def _order(run: Run, keys: Sequence[str]) -> tuple[object, ...]:
    """Sort by experiment, then by the settings that differ, numbers by size."""
    return (run.experiment, *(_number_first(run.value(key)) for key in keys), run.seed)


def _number_first(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text
