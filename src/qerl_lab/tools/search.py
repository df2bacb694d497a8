"""Search values of numeric keys: `python -m qerl_lab.tools.search out=DIR KEY=LOW..HIGH ...`.

The search is an Optuna study. Each trial is a sweep of the main command over the search's seeds. The study is a journal
in OUT, so the same command resumes after any stop, first with the trial that had begun. A proposal depends only on the
search's seed, the trial's number and earlier values, so stopping does not change the search.
"""

from qerl_lab.system import exits

with exits.starting(__name__):
    import importlib.util
    import math
    import shlex
    from collections.abc import Callable, Sequence
    from dataclasses import dataclass, field, fields
    from functools import partial
    from pathlib import Path
    from typing import TYPE_CHECKING

    from qerl_lab.cli.grammar import HELP, Command
    from qerl_lab.cli.overrides import check_words, spell_for_hydra
    from qerl_lab.config.keys import NUMBERS, check_key
    from qerl_lab.config.option import ConfigError, option
    from qerl_lab.config.out import Writes
    from qerl_lab.record.directory import RunDirectory
    from qerl_lab.system.disk import lock, make_directory, replace_file
    from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK, STOPS
    from qerl_lab.system.terminal import columns, format_path

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

FIRST_SEED = 100  # lower seeds are kept for the reported sweeps
OBJECTIVES = ("reward", "accuracy")
WHOLE = (int, int | None)
OF_SEARCH = ("seed", "-m", "--multirun", "hydra.sweep.dir", "rerun", "dry_run", "resume", "run_dir")
HOW_IT_RUNS = ("jobs=", "jobs_per_gpu=", "launcher=", "slurm=", "cpu_threads=")  # may change between two commands
JOURNAL, LOCK, TABLE = "study.journal", "LOCK", "table.txt"
ASKED, WHY = "asked", "why of trial"  # attributes of the study: its settings; a failed trial's reason, by number
STARTUP = 10  # random trials before the sampler uses results
Start = Callable[[list[str]], int]  # the words of a sweep -> its exit code


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
    return word.lstrip("+").partition("=")[0] in (*(f.name for f in fields(SearchOptions)), *HELP)


def parse_space(words: Sequence[str], options: SearchOptions) -> Space:
    """Split words into ranges (KEY=LOW..HIGH) and shared words. Raises ConfigError for a key that cannot be searched.

    Turns the evaluation off if the objective needs none, unless the words ask for one.
    """
    found = Space([])
    for word in words:
        key, _, value = word.partition("=")
        name = key.lstrip("+")
        if name in OF_SEARCH:
            raise ConfigError(f"a search types {name} itself. Leave {word} out.")
        if (ends := _parse_range(value)) is not None:
            _check_range(word, key, ends)
            if key in found.ranges:
                raise ConfigError(f"{key} is given two ranges. Type one of them.")
            found.ranges[key] = ends
        elif name == "sweeps" or (
            not word.startswith("-") and check_words([spell_for_hydra(word)])[0].is_sweep_override()
        ):
            raise ConfigError(f"{word} makes several arms, and a search is of one. Type one value, for each a search.")
        else:
            found.words.append(word)
    if not found.ranges:
        raise ConfigError("no word has a range. Type for example optim.learning_rate=1e-4..1e-2.")
    if options.objective == "accuracy" and "eval.questions=0" in words:
        raise ConfigError("objective=accuracy needs questions, and eval.questions=0 asks none. Leave one of them out.")
    if options.objective == "reward" and not any(word.startswith("eval.questions=") for word in words):
        found.words.append("eval.questions=0")
    return found


def _parse_range(value: str) -> tuple[float, float] | None:
    """Read LOW..HIGH; None for any other value, such as a path with two dots."""
    low, dots, high = value.partition("..")
    try:
        return (float(low), float(high)) if dots else None
    except ValueError:
        return None


def _check_range(word: str, key: str, ends: tuple[float, float]) -> None:
    kind = check_key(key)
    if kind not in NUMBERS:
        raise ConfigError(f"{word}: {key} is no number. Type for example optim.learning_rate=1e-4..1e-2.")
    if kind in WHOLE:
        raise ConfigError(f"{word}: {key} is a whole number, and trials have fractions. Type python -m qerl_lab -m "
                          f"{key}=A,B,C to compare some.")  # fmt: skip
    if not 0 < ends[0] < ends[1] < math.inf:
        raise ConfigError(f"{word} is no range above 0. Type for example {key}=1e-4..1e-2.")


def search(options: SearchOptions, words: list[str], start: Start | None = None) -> None:
    """Run trials until the study has the requested number; print the results and the command for a report.

    `words` are for the main command; `start` runs them, by default in this process.

    Raises:
        ConfigError: wrong options or words, OUT holds another search, or Optuna is not installed.
        ValueError: every trial failed.
        KeyboardInterrupt: a stop came.
    """
    low = [seed for seed in options.seeds if seed < FIRST_SEED]
    if low or not options.seeds or len(set(options.seeds)) < len(options.seeds):
        raise ConfigError(
            f"seeds={options.seeds}; allowed: different ones from {FIRST_SEED} on, so that none is searched on which a "
            "sweep then reports. Type for example seeds=[100,101]."
        )
    found = parse_space(words, options)
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("a search needs the package optuna, which is not installed. Type pip install "
                          "'qerl-lab[search]'.")  # fmt: skip
    from qerl_lab.cli import train

    make_directory(options.folder, f"out={options.out}")
    STOPS.clear()
    with (options.folder / LOCK).open("w") as file:
        lock(file, f"another command searches in {options.folder}. Wait for it, or type another out.")
        study = _open_study(options, found)
        while trial := _next(study, options, found):
            if STOPS:  # a stop came, although the last trial's sweep finished
                raise KeyboardInterrupt("the same command goes on with the next trial")
            _run_trial(study, trial, options, found, start or train.main)
        table = _table(study, options, found)
        replace_file(options.folder / TABLE, f"{table}\n".encode())
    print(f"\n{table}")
    if all(trial.value is None for trial in study.get_trials()):
        raise ValueError("every trial failed: the table says of what")


def _open_study(options: SearchOptions, found: Space) -> "Study":
    """Open or create the study in OUT. Raises ConfigError if it was begun with other words or options."""
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(options.folder / JOURNAL)))
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    ranges = [f"{key}={low:g}..{high:g}" for key, (low, high) in found.ranges.items()]
    asked = {
        "words": " ".join(sorted([*(word for word in found.words if not word.startswith(HOW_IT_RUNS)), *ranges])),
        "objective": options.objective, "seeds": str(options.seeds), "sampler_seed": str(options.sampler_seed),
    }  # fmt: skip
    before = study.user_attrs.get(ASKED, asked)
    for name, value in asked.items():
        if before[name] != value:
            raise ConfigError(
                f"out={options.out} is a search with other {name}: {before[name]}, and not {value}. Type another out, "
                "or the words that it began with."
            )
    study.set_user_attr(ASKED, asked)
    return study


def _next(study: "Study", options: SearchOptions, found: Space) -> "FrozenTrial | None":
    """Return the trial that an earlier command began, else a new one; None if there are enough."""
    import numpy as np
    from optuna.distributions import FloatDistribution
    from optuna.samplers import TPESampler

    trials = study.get_trials()
    for trial in trials:
        if not trial.state.is_finished() and set(trial.params) == set(found.ranges):
            return trial
        if not trial.state.is_finished():
            _fail(study, trial, "a stop came while it was proposed")
    if len(trials) >= options.trials:
        return None
    own = int(np.random.SeedSequence([options.sampler_seed, len(trials)]).generate_state(1)[0])
    study.sampler = TPESampler(seed=own, n_startup_trials=STARTUP)
    number = study.ask({key: FloatDistribution(*ends, log=True) for key, ends in found.ranges.items()}).number
    return study.get_trials()[number]


def _run_trial(study: "Study", trial: "FrozenTrial", options: SearchOptions, found: Space, start: Start) -> None:
    """Run a trial's sweep, and report its value to the study. A trial with a failed run has failed."""
    print(f"\ntrial {trial.number} of {options.trials}: {' '.join(_trial_words(trial))}", flush=True)
    seeds = f"seed={','.join(map(str, options.seeds))}"
    directory = _directory(trial, options)
    code = start(["-m", *found.words, *_trial_words(trial), seeds, f"hydra.sweep.dir={directory}"])
    if code == INTERRUPTED:
        raise KeyboardInterrupt("the same command goes on with this trial")
    if code not in (OK, FAILURE):
        if trial.number == 0:
            (options.folder / JOURNAL).unlink()  # nothing is searched yet, so the words may still change
        raise ConfigError(f"the runs of trial {trial.number} were refused, see above. Correct the words.")
    value = _value_or_reason(directory, options)
    if isinstance(value, float) and code == OK:
        study.tell(trial.number, value)
    else:
        _fail(study, trial, "its sweep failed" if isinstance(value, float) else value)


def _fail(study: "Study", trial: "FrozenTrial", why: str) -> None:
    """End a trial as failed; `why` goes into the table."""
    from optuna.trial import TrialState

    study.set_user_attr(f"{WHY} {trial.number}", why)
    study.tell(trial.number, state=TrialState.FAIL)


def _trial_words(trial: "FrozenTrial") -> list[str]:
    """Return a trial's values as words with three digits, as its runs get them."""
    return [f"{key}={value:.3g}" for key, value in sorted(trial.params.items())]


def _directory(trial: "FrozenTrial", options: SearchOptions) -> Path:
    return options.folder / f"trial-{trial.number:04}"


def _value_or_reason(directory: Path, options: SearchOptions) -> float | str:
    """Return the mean value of a trial's runs, or the reason why it has none.

    A run's value is its held-out accuracy after training, or its mean reward over all steps.
    """
    import numpy as np

    runs = [run for path in sorted(directory.glob("*")) if (run := RunDirectory(path)).is_claimed]
    for run in runs:
        if run.status == "failed":
            return f"{format_path(run.path)}: {run.reason}"
    done = [run for run in runs if run.status == "done"]
    if len(done) < len(options.seeds):
        return f"{len(done)} of its {len(options.seeds)} runs are done"
    values = []
    for run in done:
        if options.objective == "accuracy":
            values.append(float(run.result().get("accuracy_after", math.nan)))
        else:
            rewards = [line["metrics"]["reward/mean"] for line in run.metrics() if "reward/mean" in line["metrics"]]
            values.append(float(np.mean(rewards)) if rewards else math.nan)
    mean = float(np.mean(values))
    return mean if math.isfinite(mean) else f"its runs have no {options.objective}, or one that is no number"


def _table(study: "Study", options: SearchOptions, found: Space) -> str:
    """Format the trials, best first, with each failure's reason and the sweep to report on the best."""
    ended = [trial for trial in study.get_trials() if trial.state.is_finished()]
    best_first = sorted(ended, key=lambda trial: -math.inf if trial.value is None else trial.value, reverse=True)
    rows = [["trial", options.objective, *sorted(found.ranges), "directory"]]
    for trial in best_first:
        value = "failed" if trial.value is None else f"{trial.value:.4f}"
        proposed = [f"{trial.params[key]:.3g}" if key in trial.params else "-" for key in sorted(found.ranges)]
        rows.append([str(trial.number), value, *proposed, format_path(_directory(trial, options))])
    failed = [trial for trial in ended if trial.value is None]
    lines = [
        columns(rows),
        *(f"trial {trial.number} failed: {study.user_attrs[f'{WHY} {trial.number}']}" for trial in failed),
    ]
    if len(failed) < len(ended):
        words = [word for word in found.words if word != "eval.questions=0"]
        report = f"python -m qerl_lab -m {shlex.join([*words, *_trial_words(best_first[0]), 'seed=0,1,2,3,4'])}"
        lines.append(f"mean of seeds {', '.join(map(str, options.seeds))}. Report on others: {report}")
    return "\n".join(lines)


LINE = "python -m qerl_lab.tools.search"
OVER = "optim.learning_rate=1e-4..1e-2"
EXAMPLES = (
    (f"{LINE} out=searches/pocket +experiment=nvfp4_aqn aqn.sigma_start=0.01..0.3 {OVER}", "sigma and learning rate"),
    (f"{LINE} out=searches/nf4 +experiment=nf4 scale=smollm2 jobs=2 {OVER} trials=30", "of another arm and scale"),
)


def command(words: list[str]) -> Command[SearchOptions]:
    """Return the command; `words` are passed on to the main command."""
    about = "Search values of numeric keys: an Optuna study whose trials are short sweeps of the main command"
    usage = f"{LINE} WORDS OF THE MAIN COMMAND ... KEY=LOW..HIGH ..."
    return Command(
        usage, about, SearchOptions, partial(search, words=words), examples=EXAMPLES, required=("out",), alone=True
    )


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    own = [word for word in words if is_own(word)]
    if words and not own:
        own = ["out="]  # then the error names `out` as missing; the manual is only for an empty command
    return command([word for word in words if not is_own(word)]).run(own)


if __name__ == "__main__":
    exits.run(main)
