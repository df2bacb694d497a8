"""Run a search as an Optuna study: each trial is a sweep over the search's seeds by the main command.

The study is a journal in OUT, so that a search resumes after any stop, first with the trial that had begun. A proposal
depends only on the search's seed, the trial's number and earlier values, so stopping does not change the search.
"""

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.trial import FrozenTrial, TrialState

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import lock, make_directory, replace_file
from qerl_lab.exits import FAILURE, INTERRUPTED, OK, STOPS
from qerl_lab.record.directory import RunDirectory
from qerl_lab.terminal import columns, near
from qerl_lab.tools.search_space import SearchOptions, Space

NAME = "search"
JOURNAL, LOCK, TABLE = "study.journal", "LOCK", "table.txt"
ASKED = "asked"  # study attribute with the settings common to all trials
HOW_IT_RUNS = ("jobs=", "jobs_per_gpu=", "launcher=", "slurm=", "cpu_threads=")  # may change between two commands
STARTUP = 10  # random trials before the sampler uses results
ENDED = (TrialState.COMPLETE, TrialState.FAIL)
Start = Callable[[list[str]], int]  # the words of a sweep -> its exit code


def run(options: SearchOptions, space: Space, start: Start) -> None:
    """Run trials until the study has the requested number; print the results and the command for a report.

    Raises ConfigError if OUT holds another search or cannot be written, or if a trial's words are refused; ValueError
    if every trial failed; KeyboardInterrupt after a stop.
    """
    make_directory(options.folder, f"out={options.out}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    STOPS.clear()
    with locked(options.folder):
        study = _opened(options, space)
        while trial := _next(study, options, space):
            if STOPS:  # a stop came, although the last trial's sweep finished
                raise KeyboardInterrupt("the same command goes on with the next trial")
            _run_trial(study, trial, options, space, start)
        table = _table(study, options, space)
        replace_file(options.folder / TABLE, f"{table}\n".encode())
        found = any(trial.value is not None for trial in study.get_trials(deepcopy=False))
    print(f"\n{table}")
    if not found:
        raise ValueError("every trial failed: the table says of what")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a search. Raises ConfigError if another command holds it."""
    with (folder / LOCK).open("w") as file:
        lock(file, f"another command searches in {folder}. Wait for it, or type another out.")
        yield


def _opened(options: SearchOptions, space: Space) -> optuna.Study:
    """Open or create the study in OUT. Raises ConfigError if it was begun with other words or options."""
    storage = JournalStorage(JournalFileBackend(str(options.folder / JOURNAL)))
    study = optuna.create_study(storage=storage, study_name=NAME, direction="maximize", load_if_exists=True)
    ranges = [f"{key}={low:g}..{high:g}" for key, (low, high) in space.ranges.items()]
    how = [word for word in space.words if not word.startswith(HOW_IT_RUNS)]
    asked = {
        "words": " ".join(sorted([*how, *ranges])), "objective": options.objective,
        "seeds": str(options.seeds), "sampler_seed": str(options.sampler_seed),
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


def _next(study: optuna.Study, options: SearchOptions, space: Space) -> FrozenTrial | None:
    """Return the trial that an earlier command began, else a new one; None if there are enough."""
    trials = study.get_trials(deepcopy=False)
    begun = [trial for trial in trials if trial.state == TrialState.RUNNING]
    if begun:
        return begun[0]
    if len(trials) >= options.trials:
        return None
    own = int(np.random.SeedSequence([options.sampler_seed, len(trials)]).generate_state(1)[0])
    study.sampler = optuna.samplers.TPESampler(seed=own, n_startup_trials=STARTUP)
    ranges: dict[str, BaseDistribution] = {
        key: FloatDistribution(low, high, log=True) for key, (low, high) in space.ranges.items()
    }
    number = study.ask(ranges).number
    return study.get_trials(deepcopy=False)[number]


def _run_trial(study: optuna.Study, trial: FrozenTrial, options: SearchOptions, space: Space, start: Start) -> None:
    """Run a trial's sweep, and report its value to the study. A trial with a failed run has failed."""
    print(f"\ntrial {trial.number} of {options.trials}: {' '.join(_proposed(trial))}", flush=True)
    directory = _directory(trial, options)
    if set(trial.params) != set(space.ranges):  # a stop interrupted its proposal
        study.tell(trial.number, state=TrialState.FAIL)
        return
    seeds = f"seed={','.join(map(str, options.seeds))}"
    code = start(["-m", *space.words, *_proposed(trial), seeds, f"hydra.sweep.dir={directory}"])
    if code == INTERRUPTED:
        raise KeyboardInterrupt("the same command goes on with this trial")
    if code not in (OK, FAILURE):
        study.tell(trial.number, state=TrialState.FAIL)
        if trial.number == 0:
            (options.folder / JOURNAL).unlink()  # nothing is searched yet, so the words may still change
        raise ConfigError(f"the runs of trial {trial.number} were refused, see above. Correct the words.")
    found = _value_or_reason(directory, options)
    if code == OK and isinstance(found, float):
        study.tell(trial.number, found)
    else:
        study.tell(trial.number, state=TrialState.FAIL)


def _proposed(trial: FrozenTrial) -> list[str]:
    """Return a trial's values as words with three digits, as its runs get them."""
    return [f"{key}={value:.3g}" for key, value in sorted(trial.params.items())]


def _directory(trial: FrozenTrial, options: SearchOptions) -> Path:
    return options.folder / f"trial-{trial.number:04}"


def _value_or_reason(directory: Path, options: SearchOptions) -> float | str:
    """Return the mean value of a trial's runs, or the reason why it has none."""
    runs = [run for path in sorted(directory.glob("*")) if (run := RunDirectory(path)).is_claimed]
    for run in runs:
        if run.status == "failed":
            return f"{near(run.path)}: {run.reason}"
    done = [run for run in runs if run.status == "done"]
    if len(done) < len(options.seeds):
        return f"{len(done)} of its {len(options.seeds)} runs are done"
    mean = float(np.mean([_value(run, options.objective) for run in done]))
    return mean if math.isfinite(mean) else f"its runs have no {options.objective}, or one that is no number"


def _value(run: RunDirectory, objective: str) -> float:
    """Return a finished run's held-out accuracy after training, or its mean reward over all steps; NaN without one."""
    if objective == "accuracy":
        return float(run.result().get("accuracy_after", math.nan))
    rewards = [line["metrics"]["reward/mean"] for line in run.metrics() if "reward/mean" in line["metrics"]]
    return float(np.mean(rewards)) if rewards else math.nan


def _why(trial: FrozenTrial, options: SearchOptions, space: Space) -> str:
    """Say why a trial failed, from the directories of its runs."""
    if set(trial.params) != set(space.ranges):
        return "a stop came while it was proposed"
    found = _value_or_reason(_directory(trial, options), options)
    return found if isinstance(found, str) else "its sweep failed"


def _table(study: optuna.Study, options: SearchOptions, space: Space) -> str:
    """Format the trials, best first, with each failure's reason and the sweep to report on the best."""
    ended = [trial for trial in study.get_trials(deepcopy=False) if trial.state in ENDED]
    ended.sort(key=lambda trial: -math.inf if trial.value is None else trial.value, reverse=True)
    rows = [["trial", options.objective, *sorted(space.ranges), "directory"]]
    for trial in ended:
        worth = "failed" if trial.value is None else f"{trial.value:.4f}"
        values = [f"{trial.params[key]:.3g}" if key in trial.params else "-" for key in sorted(space.ranges)]
        rows.append([str(trial.number), worth, *values, near(_directory(trial, options))])
    failed = sorted((trial for trial in ended if trial.value is None), key=lambda trial: trial.number)
    lines = [columns(rows), *(f"trial {trial.number} failed: {_why(trial, options, space)}" for trial in failed)]
    if ended and ended[0].value is not None:
        words = [word for word in space.words if word != "eval.questions=0"]
        report = f"python -m qerl_lab -m {shlex.join([*words, *_proposed(ended[0]), 'seed=0,1,2,3,4'])}"
        lines.append(f"mean of seeds {', '.join(map(str, options.seeds))}. Report on others: {report}")
    return "\n".join(lines)
