"""Group runs into arms, choose the runs that count, and label each arm. Pure.

Runs belong to one arm if they share every setting for which `arm.is_of_arm` holds and ran on one kind of device. The
experiment's name does not decide; it only starts the label.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import yaml

from qerl_lab.config.arm import drop_other_engines, fill_added_keys, is_of_arm, model_by_content
from qerl_lab.config.choices import matching_option
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.task import subset_in_words

FINISHED = "finished"
PLACE, CONTENT = "model.path", "model.hash"
QUESTIONS = "task.path"
ABSENT = "(absent)"  # stands for a setting that a run lacks
TASK = "task.name"
NO_EXPERIMENT = RunConfig().experiment
CHOICES = ("algorithm", "aqn")  # groups of conf/ in which one choice sets several keys
LONGEST = 48  # characters of a value in a label; the pocket model's longest path has 41
Arm = tuple[tuple[str, str], ...]  # the settings that define an arm, sorted
RENAMED = {"bf16_hot": "bf16_temperature", "bf16_bonus": "bf16_entropy_bonus"}  # earlier names of arms


@dataclass(frozen=True)
class Run:
    """A run with the settings that define its arm.

    `settings` maps dotted keys to text and always holds model.path. `declared` names the keys in which its experiment
    is meant to differ from others (`differs_in`). `status` is `FINISHED` or says what happened instead; `ended` is in
    unix seconds.
    """

    name: str
    experiment: str  # its present name in conf/experiment/
    seed: int
    settings: Mapping[str, str] = field(hash=False)
    declared: frozenset[str]
    status: str
    ended: float
    code: str

    @property
    def arm(self) -> Arm:
        """Return the settings that define the arm to which the run belongs."""
        return tuple(sorted(model_by_content(self.settings).items()))

    def value(self, key: str) -> str:
        """Return a setting, or `ABSENT`, as other versions lack some and only local models have model.hash."""
        return self.settings.get(key, ABSENT)


def task_of(run: Run) -> str:
    """Return the name of a run's task, and how many of its questions are read if not all are."""
    name, most = run.value("task.name"), run.value("task.gsm8k.max_steps")
    return name + subset_in_words(name, int(most) if most.isdigit() else None)


def run_from(values: Mapping[str, str], *, name: str, status: str, ended: float, code: str, metrics: Collection) -> Run:
    """Build a Run from the flattened configuration of a run directory and the names of its recorded metrics.

    Raises ValueError if the values are no configuration of this lab.
    """
    try:
        device, seed, declared = values["device"], int(values["seed"]), yaml.safe_load(values["differs_in"])
        experiment = RENAMED.get(values["experiment"], values["experiment"])
    except (KeyError, ValueError) as error:
        raise ValueError(f"its configuration lacks {error}") from None
    if device == "auto" and metrics:  # the first GPU if torch saw one; its peak memory is then recorded
        device = "cuda" if "memory/gpu_peak_gib" in metrics else "cpu"
    own = normalize(dict(values) | {"device": device})
    settings = {key: value for key, value in own.items() if is_of_arm(key) or key == "device"}
    if settings.get(CONTENT) == "None":  # older records lack the key, which means the same
        del settings[CONTENT]
    return Run(name, experiment, seed, settings, frozenset(declared), status, ended, code)


def fill_in_device(runs: Sequence[Run]) -> list[Run]:
    """Replace device=auto, in runs that ended before step 1, by the device of the only arm otherwise equal."""
    known, found = {run.arm for run in runs}, []
    for run in runs:
        if run.value("device") == "auto":
            kinds = (replace(run, settings=normalize({**run.settings, "device": kind})) for kind in ("cpu", "cuda"))
            there = [moved for moved in kinds if moved.arm in known]
            run = there[0] if len(there) == 1 else run
        found.append(run)
    return found


def normalize(settings: Mapping[str, str]) -> dict[str, str]:
    """Return settings of any version in today's form, so that runs of one arm compare equal."""
    own = drop_other_engines(fill_added_keys(settings))
    if own["device"] == "cpu" and own.get("optim.packing") == "off":  # `auto` packs on GPUs only
        own["optim.packing"] = "auto"
    return own


def code_version(git_sha: str | None, dirty: bool | None) -> str:
    """Format the commit of a run's code, from its env.json: `1a2b3c4`, or `1a2b3c4 with changes`."""
    return f"{(git_sha or 'unknown')[:7]}{' with changes' if dirty else ''}"


def choose_runs(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest finished run of each (arm, seed), sorted by both, and the reason for each run left out."""
    counted: dict[tuple[Arm, int], Run] = {}
    left_out = [f"{run.name}: {run.status}" for run in runs if is_unfinished(run)]
    for run in sorted((run for run in runs if not is_unfinished(run)), key=lambda run: run.ended):
        if older := counted.get((run.arm, run.seed)):
            left_out.append(f"{older.name}: repeated by {run.name}, with the same settings and seed")
        counted[run.arm, run.seed] = run
    keys = differing_keys(list(counted.values()))

    def sort_key(run: Run) -> tuple[object, ...]:
        return run.experiment, *(number_first(run.value(key)) for key in keys), run.seed

    return sorted(counted.values(), key=sort_key), left_out


def is_unfinished(run: Run) -> bool:
    """Tell whether a run failed, was interrupted or is still running."""
    return run.status != FINISHED


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the setting keys that differ in value between runs; model.path or model.hash if both say the same."""
    known = sorted({key for run in runs for key in run.settings} - {_redundant_key(runs)})
    return [key for key in known if len({run.value(key) for run in runs}) > 1]


def _redundant_key(runs: Sequence[Run]) -> str | None:
    """Return whichever of model.path and model.hash adds nothing to the other; None if both distinguish runs.

    The hash is redundant if paths and hashes pair one to one, as readers know the path; the path if all hashes are
    equal.
    """
    pairs = {(run.value(PLACE), run.value(CONTENT)) for run in runs}
    places, contents = ({pair[n] for pair in pairs} for n in (0, 1))
    if len(places) == len(contents) == len(pairs):
        return CONTENT
    return PLACE if len(contents) == 1 and ABSENT not in contents else None


def labels(runs: Sequence[Run]) -> dict[Arm, str]:
    """Label each arm with its experiment, if any, and the settings that the experiment's name does not imply.

    A label omits a setting that the arm's experiment does not declare if more than half of such arms share its value,
    and settings that follow from the task's name, such as its instruction. Long values are shortened; the settings of a
    group in `CHOICES` appear as its choice.
    """
    arms, found = {run.arm: run for run in runs}, {}
    implied, differ = keys_implied_by_task([run.settings for run in runs]), differing_keys(runs)
    for arm, run in arms.items():
        names = {other.experiment for other in runs if other.arm == arm} - {NO_EXPERIMENT}
        keys = [key for key in differ if key not in implied and _belongs_in_label(key, run, list(arms.values()), runs)]
        name, settings = " = ".join(sorted(names)), ", ".join(_format_settings(run, keys, differ))
        found[arm] = f"{name} ({settings})" if name and settings else name or settings or NO_EXPERIMENT
    return found


def _belongs_in_label(key: str, run: Run, arms: Sequence[Run], runs: Sequence[Run]) -> bool:
    """Tell whether a label needs `key`: the experiment does not imply it and at most half of the arms share it."""
    undeclared = [other.value(key) for other in arms if key not in other.declared]
    if key in run.declared or len(set(undeclared)) == 1:
        return len({other.value(key) for other in runs if other.experiment == run.experiment}) > 1
    return 2 * undeclared.count(run.value(key)) <= len(undeclared)


def _format_settings(run: Run, keys: Sequence[str], differ: Sequence[str]) -> list[str]:
    """Format settings as `key=value` for a label, or as a group's choice if that covers all that differs."""
    words = {key: format_setting(key, run.value(key)) for key in keys}
    for group in CHOICES:
        own = [key for key in keys if key.startswith(f"{group}.")]
        also = [key for key in differ if key.startswith(f"{group}.")]
        if own and (choice := matching_option(group, run.settings, also)):
            words = {key: word for key, word in words.items() if key not in own} | {own[0]: f"{group}={choice}"}
    return [words[key] for key in sorted(words)]


def keys_implied_by_task(settings: Sequence[Mapping[str, str]]) -> set[str]:
    """Return the `task.*` keys that follow from the task's name: each has one value per task."""
    names = {one.get(TASK) for one in settings}
    keys = {key for one in settings for key in one if key.startswith("task.") and key != TASK}
    return {key for key in keys if len({(one.get(TASK), one.get(key)) for one in settings}) == len(names)}


def format_setting(key: str, value: str) -> str:
    """Format a setting as `key=value` for a label, with a long value shortened."""
    return f"{'task' if key == TASK else key}={shorten(value)}"


def shorten(value: str) -> str:
    """Shorten a long value: keep the beginning of a text or the end of a path, and add a hash.

    The hash keeps labels unique, since a report identifies arms by label.
    """
    if len(value) <= LONGEST:
        return value
    mark, room = hashlib.sha256(value.encode()).hexdigest()[:6], LONGEST - 12
    return f"{value[:room].rstrip()}... #{mark}" if " " in value else f"...{value[-room:]} #{mark}"


def number_first(text: str) -> tuple[bool, float, str]:
    """Return a sort key for text: numbers come first, by size, then other text by alphabet."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text
