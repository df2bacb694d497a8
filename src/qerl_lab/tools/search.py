"""Search values of numeric keys: `python -m qerl_lab.tools.search out=DIR OVERRIDES KEY=LOW..HIGH ...`.

The search is an Optuna study in OUT. Each trial is a sweep of the main command over the search's seeds. The same
command continues after a stop, first with the unfinished trial. A proposal depends only on the trial's number and on
earlier values, so the search is the same with and without a stop, unless the source files of qerl_lab changed between.
"""

import math
import shlex
import statistics
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.grammar import HELP, Command
from qerl_lab.config.arm import OF_SWEEPS
from qerl_lab.config.keys import field_of_key
from qerl_lab.config.option import ConfigError, check_bounds, option, require_package
from qerl_lab.config.spelling import hydra_override
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import code_hash
from qerl_lab.record.out import OutputOptions
from qerl_lab.system import exits
from qerl_lab.system.disk import make_directory
from qerl_lab.system.terminal import columns, format_path, python_command

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

FIRST_SEED = 100  # lower seeds are kept for the reported sweeps
HOW_IT_RUNS = (*OF_SWEEPS, "cpu_threads")  # keys that may change between two commands
TABLE = "table.txt"
ASKED = "asked"  # attribute of the study: the overrides that it was begun with
CODES = "codes"  # attribute of the study: each `code_hash` that its trials ran with, oldest first
SET_BY_SEARCH = {"seed": "seeds=[100,101]", "run_dir": "out=DIR", "hydra.sweep.dir": "out=DIR"}  # key -> what to type
OTHER_CODE = (
    "note: the search began with other source files of qerl_lab than later trials had (code_hash in env.json), and "
    "other code may give other values. Type another out to search with one code."
)
Ranges = dict[str, tuple[float, float]]


@dataclass
class SearchOptions(OutputOptions):
    out: str = option("", "directory of the search: its study, and a sweep for each trial; required")
    objective: str = option(
        "reward", "reward: mean over all steps, without evaluation; accuracy: of the held-out questions after training",
        choices=("reward", "accuracy"),
    )  # fmt: skip
    trials: int = option(20, "number of trials, failed ones included", at_least=1, at_most=10_000)
    seeds: list[int] = option(
        [100, 101], "seeds of each trial, from 100 on; lower seeds are for reported sweeps", at_least=FIRST_SEED
    )

    @property
    def seed_override(self) -> str:
        """Return the override `seed=A,B,...` of each trial's sweep."""
        return f"seed={','.join(map(str, self.seeds))}"

    def trial_folder(self, trial: "FrozenTrial") -> Path:
        """Return the folder of a trial's sweep: OUT/trial-NNNN."""
        return self.folder / f"trial-{trial.number:04}"


def is_own(word: str) -> bool:
    """Tell whether an override (`key=value`) is an option of the search; all others are for the main command."""
    return word.lstrip("+").partition("=")[0] in (*(f.name for f in fields(SearchOptions)), *HELP)


def read_space(overrides: list[str], options: SearchOptions) -> tuple[list[str], Ranges]:
    """Split overrides (`key=value`) into those that all trials share, and the ranges KEY=LOW..HIGH to search.

    Adds eval.questions=0 to the shared overrides if the objective is the reward, unless `overrides` set it. Plans a
    trial with the lowest values, without starting it. Raises ConfigError if this plan is refused or has several runs
    per seed, if a range is wrong, if no range or no seed is given, or if `overrides` set what the search sets.
    """
    shared, ranges, lowest = list[str](), Ranges(), list[str]()
    if not options.seeds:
        raise ConfigError("seeds=[] is empty; allowed: one seed or more. Type for example seeds=[100,101].")
    for override in overrides:
        key, _, value = override.partition("=")
        if instead := SET_BY_SEARCH.get(key.lstrip("+")):
            raise ConfigError(f"{override}: a search sets {key.lstrip('+')} of its runs. Type {instead}.")
        ends = _read_range(value)
        if ends is None:
            shared.append(override)
            continue
        if "..." in value:  # one dot too many would make .1e-2 of 1e-2
            raise ConfigError(f"{override} has three dots. Type {key}={value.replace('...', '..')}.")
        field = field_of_key(key)
        if field.type not in (float, float | None):
            raise ConfigError(
                f"{override}: a search proposes fractions, and {key} takes none. "
                f"Type python -m qerl_lab -m {key}=A,B,C to compare some values."
            )
        if not 0 < ends[0] < ends[1] < math.inf:
            raise ConfigError(f"{override} is not allowed; allowed: 0 < LOW < HIGH. Type {key}=LOW..HIGH.")
        for end in ends:  # as a run would get it: 0.9999 rounds to 1
            check_bounds(key, field.metadata, float(f"{end:.3g}"))
        ranges[key] = ends
        lowest.append(f"{key}={ends[0]:.3g}")
    if not ranges:
        raise ConfigError("no override has a range. Type for example optim.learning_rate=1e-4..1e-2.")
    if options.objective == "reward" and not any(word.startswith("eval.questions=") for word in shared):
        shared.append("eval.questions=0")
    jobs = make_plan([*shared, *lowest, options.seed_override], multirun=True).jobs
    if len(jobs) > len(options.seeds):
        raise ConfigError(
            f"the overrides make {len(jobs)} runs for {len(options.seeds)} seeds; a search takes one arm. "
            "Type one value for each key, and one search for each arm."
        )
    if any(job.config.dry_run for job in jobs):
        raise ConfigError("dry_run=true starts no run, and a search needs their results. Leave dry_run out.")
    if options.objective == "accuracy" and not all(job.config.eval.questions for job in jobs):
        raise ConfigError("objective=accuracy needs held-out questions. Type for example eval.questions=256.")
    return shared, ranges


def _read_range(value: str) -> tuple[float, float] | None:
    """Parse LOW..HIGH; None for any other value, such as a path with two dots."""
    low, dots, high = value.partition("..")
    try:
        return (float(low), float(high)) if dots else None
    except ValueError:
        return None


def search(options: SearchOptions, overrides: list[str]) -> None:
    """Run trials until the study has `options.trials`; print the results, and the command to report the best.

    Raises ConfigError for wrong options or overrides, if `options.out` holds another search or if Optuna is missing;
    ValueError if every trial failed; KeyboardInterrupt after a stop.
    """
    shared, ranges = read_space(overrides, options)
    require_package("a search", "optuna", "pip install 'qerl-lab[search]'")
    make_directory(options.folder, f"out={options.out}")
    import optuna
    from optuna.storages.journal import JournalFileBackend, JournalStorage
    from optuna.trial import TrialState

    from qerl_lab.cli import train

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(options.folder / "study.journal")))
    study = optuna.create_study(storage=storage, study_name="search", direction="maximize", load_if_exists=True)
    kept = [word for word in shared if word.partition("=")[0] not in HOW_IT_RUNS]
    kept = sorted([*kept, *(f"{key}={low:g}..{high:g}" for key, (low, high) in ranges.items())])
    asked = shlex.join([*kept, f"objective={options.objective}", f"seeds={options.seeds}"])
    before = study.user_attrs.get(ASKED, asked)
    if before != asked:
        raise ConfigError(
            f"out={options.out} holds a search with other overrides: it began with {before}, and {asked} was given. "
            "Type another out, or the overrides that the search began with."
        )
    study.set_user_attr(ASKED, asked)
    if sum(trial.state.is_finished() for trial in study.trials) < options.trials:
        codes = list(dict.fromkeys([*study.user_attrs.get(CODES, []), code_hash()]))
        study.set_user_attr(CODES, codes)
        if len(codes) > 1:
            print(OTHER_CODE)
    while trial := _next_trial(study, options, ranges):
        print(f"\ntrial {trial.number} of {options.trials}: {' '.join(_overrides(trial))}", flush=True)
        sweep = hydra_override("hydra.sweep.dir", str(options.trial_folder(trial)))
        code = train.main(["-m", *shared, *_overrides(trial), options.seed_override, sweep])
        if code == exits.INTERRUPTED:
            raise KeyboardInterrupt("the same command continues this trial")
        if code == exits.USAGE:
            raise ConfigError(
                f"the runs of trial {trial.number} were refused. Correct the overrides as the message above "
                "says, and type another out."
            )
        value = _mean_over_runs(options.trial_folder(trial), options)
        study.tell(trial.number, value, TrialState.FAIL if value is None else None)
    table = _format_table(study, options, shared)
    (options.folder / TABLE).write_text(f"{table}\n", encoding="utf-8")
    print(f"\n{table}")
    if all(trial.value is None for trial in study.trials):
        raise ValueError("every trial failed; the file FAILED in the directory of each run has the reason")


def _next_trial(study: "Study", options: SearchOptions, ranges: Ranges) -> "FrozenTrial | None":
    """Return the unfinished trial of an earlier command, else a new trial; None if the study has all its trials.

    `ranges` maps each key to its (low, high).
    """
    from optuna.distributions import FloatDistribution
    from optuna.samplers import TPESampler
    from optuna.trial import TrialState

    for trial in study.get_trials(states=[TrialState.RUNNING]):
        if set(trial.params) == set(ranges):
            return trial
        study.tell(trial.number, state=TrialState.FAIL)  # a stop came while it was proposed
    number = len(study.trials)
    if number >= options.trials:
        return None
    study.sampler = TPESampler(seed=number)
    study.ask({key: FloatDistribution(*ends, log=True) for key, ends in ranges.items()})
    return study.trials[number]


def _overrides(trial: "FrozenTrial") -> list[str]:
    """Return a trial's values as overrides (`key=value`), rounded to three digits, as its runs get them."""
    return [f"{key}={value:.3g}" for key, value in sorted(trial.params.items())]


def _mean_over_runs(directory: Path, options: SearchOptions) -> float | None:
    """Return the mean of the objective over the runs in the folder of a trial.

    None if a run is not finished or has no finite value.
    """
    done = [run for path in sorted(directory.glob("*")) if (run := RunDirectory(path)).status == "done"]
    values = []
    for run in done:
        rewards = [line["metrics"]["reward/mean"] for line in run.metrics() if "reward/mean" in line["metrics"]]
        accuracy = run.result().get("accuracy_after", math.nan)
        values.append(accuracy if options.objective == "accuracy" else statistics.fmean(rewards or [math.nan]))
    is_whole = len(done) == len(options.seeds) and all(map(math.isfinite, values))
    return statistics.fmean(values) if is_whole else None


def _format_table(study: "Study", options: SearchOptions, shared: list[str]) -> str:
    """Format the table of trials, best first, and the command that runs the best values with other seeds.

    A note tells if source files changed during the search.
    """
    trials = sorted(study.trials, key=lambda trial: -math.inf if trial.value is None else trial.value, reverse=True)
    best = trials[0]
    rows = [["trial", options.objective, "values", "directory"]]
    for trial in trials:
        value = "failed" if trial.value is None else f"{trial.value:.4f}"
        rows.append([str(trial.number), value, " ".join(_overrides(trial)), format_path(options.trial_folder(trial))])
    words = [*(word for word in shared if word != "eval.questions=0"), *_overrides(best), "seed=0,1,2,3,4"]
    changed = [OTHER_CODE] if len(study.user_attrs.get(CODES, [])) > 1 else []
    lines = [columns(rows), *changed, f"mean of seeds {', '.join(map(str, options.seeds))}."]
    if best.value is not None:
        lines[-1] += " Report the best values on other seeds."
        lines.append(f"next: {python_command()} -m qerl_lab -m {shlex.join(words)}")
    return "\n".join(lines)


LINE = "python -m qerl_lab.tools.search"
OVER = "optim.learning_rate=1e-4..1e-2"
EXAMPLES = (
    (f"{LINE} out=searches/pocket +experiment=nvfp4_aqn aqn.sigma_start=0.01..0.3 {OVER}", "sigma and learning rate"),
    (f"{LINE} out=searches/nf4 +experiment=nf4 scale=smollm2 jobs=2 {OVER} trials=30", "of another arm and scale"),
)


@exits.command
def main(arguments: list[str]) -> int:
    """Run the command `search` and return its exit code. `arguments` has its options, and overrides of its runs."""
    own = [word for word in arguments if is_own(word)]
    if arguments and not own:
        own = ["out="]  # then the error names `out` as missing; the manual is only for an empty command
    work = partial(search, overrides=[word for word in arguments if not is_own(word)])
    about = "Search values of numeric keys: an Optuna study of short sweeps of the main command"
    usage = f"{LINE} OVERRIDES ... KEY=LOW..HIGH ..."
    return Command(usage, about, SearchOptions, work, examples=EXAMPLES, required=("out",), alone=True).run(own)


if __name__ == "__main__":
    exits.run(main)
