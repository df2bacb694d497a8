"""Options of `python -m qerl_lab.tools.search`, and the ranges in its other words. Imports no Optuna."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from qerl_lab.cli.overrides import check_words, spell
from qerl_lab.config.keys import NUMBERS, check_key
from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.out import Writes

FIRST_SEED = 100  # lower seeds are kept for the reported sweeps
OBJECTIVES = ("reward", "accuracy")
WHOLE = (int, int | None)
OF_SEARCH = ("seed", "-m", "--multirun", "hydra.sweep.dir", "rerun", "dry_run", "resume", "run_dir")


@dataclass
class SearchOptions(Writes):
    out: str = option("", "directory of the search: its study, and a sweep for each trial; required")
    objective: str = option(
        "reward", "mean reward of all steps, without evaluation; or accuracy after training, on the held-out questions",
        choices=OBJECTIVES,
    )  # fmt: skip
    trials: int = option(20, "finished or failed trials that the study shall have", at_least=1, at_most=10_000)
    seeds: list[int] = option([100, 101], "seeds of each trial, from 100 on: those below are of sweeps that report")
    sampler_seed: int = option(
        0, "of the search: a proposal follows from it, its number and the trials before", at_least=0, at_most=2**31
    )


@dataclass(frozen=True)
class Space:
    """The search space: the words that all trials share, and the range of each varied key."""

    words: list[str]
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)


def is_own(word: str) -> bool:
    """Tell whether a word is an option of the search; all others are for the main command."""
    return word.lstrip("+").partition("=")[0] in (*(f.name for f in fields(SearchOptions)), "--help", "-h")


def space(words: Sequence[str], options: SearchOptions) -> Space:
    """Split words into ranges (KEY=LOW..HIGH) and shared words. Raises ConfigError for a key that cannot be searched.

    Turns the evaluation off if the objective needs none, unless the words ask for one.
    """
    found = Space([])
    for word in words:
        key, _, value = word.partition("=")
        if key.lstrip("+") in OF_SEARCH:
            raise ConfigError(f"{word} is not for a search to be told; it types its own. Leave {key} out.")
        if (ends := _ends(value)) is None:
            _refuse_several(word)
            found.words.append(word)
            continue
        _check_range(word, key, ends)
        if key in found.ranges:
            raise ConfigError(f"{key} is given two ranges. Type one of them.")
        found.ranges[key] = ends
    if not found.ranges:
        raise ConfigError("no word has a range. Type for example optim.learning_rate=1e-4..1e-2.")
    if options.objective == "accuracy" and "eval.questions=0" in words:
        raise ConfigError("eval.questions=0 leaves objective=accuracy nothing to go by. Leave one of the two out.")
    if options.objective == "reward" and not any(word.startswith("eval.questions=") for word in words):
        found.words.append("eval.questions=0")
    return found


def _refuse_several(word: str) -> None:
    """Raise ConfigError for a word that makes several arms: a trial is one arm."""
    key = word.partition("=")[0].lstrip("+")
    if key == "sweeps" or (not word.startswith("-") and check_words([spell(word)])[0].is_sweep_override()):
        raise ConfigError(f"{word} makes several arms, and a search is of one. Type one value, for each a search.")


def _check_range(word: str, key: str, ends: tuple[float, float]) -> None:
    kind = check_key(key)
    if kind not in NUMBERS:
        raise ConfigError(f"{word}: {key} is no number. Type for example optim.learning_rate=1e-4..1e-2.")
    if kind in WHOLE:
        raise ConfigError(f"{word}: {key} is a whole number, and trials have fractions. Type python -m qerl_lab -m "
                          f"{key}=A,B,C to compare some.")  # fmt: skip
    if not 0 < ends[0] < ends[1] < math.inf:
        raise ConfigError(f"{word} is no range above 0. Type for example {key}=1e-4..1e-2.")


def _ends(value: str) -> tuple[float, float] | None:
    low, dots, high = value.partition("..")
    try:
        return (float(low), float(high)) if dots else None
    except ValueError:  # a path
        return None


def check(options: SearchOptions) -> None:
    """Raise ConfigError for seeds below 100, which are kept for reported sweeps, and for none or duplicates."""
    low = [seed for seed in options.seeds if seed < FIRST_SEED]
    if low or not options.seeds or len(set(options.seeds)) < len(options.seeds):
        raise ConfigError(
            f"seeds={options.seeds}; allowed: different ones from {FIRST_SEED} on, so that none is searched on which a "
            "sweep then reports. Type for example seeds=[100,101]."
        )
