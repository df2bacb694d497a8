"""The command line: `python -m qerl_lab [FLAGS] KEY=VALUE ...`. Imports no torch.

    arguments -> hydra.main -> every job checked, its directory claimed -> launch.start (a run), or
              -> hydra_plugins.qerl_lab_launcher -> scheduler.run (a process per job) -> table

Exit codes: 0 done, 1 a run failed, 2 a configuration error, 130 interrupted.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict, read_write

import qerl_lab
from qerl_lab import preflight
from qerl_lab.cli import cluster, compose, jobs, launch, manual, scheduler
from qerl_lab.cli.compose import VERSION_BASE, Plan, register_schema_and_sweeps
from qerl_lab.cli.grammar import refuse_repeated_keys, unknown_flag_error
from qerl_lab.cli.intent import overrides_by_key
from qerl_lab.cli.overrides import GROUPS, as_config_errors, overrides_of_runs, parse_overrides, spell_for_hydra
from qerl_lab.config.arm import OF_SWEEPS
from qerl_lab.config.conf_folder import package_data
from qerl_lab.config.keys import FOREIGN_NAMES, TYPES, check_type, field_of_key, what_to_type
from qerl_lab.config.option import ConfigError, check_bounds
from qerl_lab.config.redact import redact, redact_and_join
from qerl_lab.config.spelling import hydra_override, resume_override, unquoted
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.system import exits
from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK, USAGE
from qerl_lab.system.processes import refuse_several_processes
from qerl_lab.system.terminal import format_path, python_command

FLAGS = ("--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m")
FLAGS_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd")
LAUNCHER = "lab"  # our launcher, in hydra_plugins
HERE = ("basic", "joblib", "submitit_local")  # other launchers of Hydra that run jobs on this machine


@exits.command
def main(arguments: list[str]) -> int:
    """Run the command `python -m qerl_lab` with these arguments; print errors; return the exit code."""
    if not arguments:
        print(manual.overview())
        return OK
    if "--version" in arguments:
        print(f"qerl-lab {qerl_lab.__version__}")
        return OK
    flags, overrides = _split_flags_from_overrides(arguments)
    if {"--help", "-h"} & set(flags):
        print(manual.help_text())
        return OK
    refuse_several_processes(os.environ)
    if "resume" in (given := overrides_by_key(overrides)):
        refuse_repeated_keys((word.lstrip("+").partition("=")[0], word) for word in overrides)
        return _resume(flags, given)
    overrides = [spell_for_hydra(word) for word in overrides]
    parse_overrides(overrides)
    with as_config_errors():
        return _run_hydra([*flags, *overrides])


def _run_hydra(arguments: list[str]) -> int:
    """Start Hydra with these arguments; Hydra calls `run`. Return the exit code. Errors are raised, not printed."""
    register_schema_and_sweeps()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        run()
    except PastHydra as left:
        raise left.__cause__ or left from None
    except SystemExit as ended:
        return int(ended.code or OK)
    finally:
        sys.argv = before
    return OK


class PastHydra(BaseException):
    """Carries another exception, its `__cause__`, through Hydra.

    This is a BaseException, because Hydra would log an Exception from a callback, and announce an Exception from a job.
    """


@contextmanager
def past_hydra() -> Iterator[None]:
    """Context manager: re-raise any Exception as `PastHydra`. `_run_hydra` then raises the original exception."""
    try:
        yield
    except Exception as error:
        raise PastHydra from error


class CheckJobs(Callback):
    """Hydra callback for sweeps: at the start check all jobs and create their directories; at the end print results."""

    plan: ClassVar[Plan]  # of the sweep under way; `LabLauncher` reads it

    @past_hydra()
    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Override Hydra's hook before the first job of a sweep: check all jobs and create their directories.

        `config` is the configuration that Hydra composed for the sweep. Sets hydra.sweep.dir of `config` in place,
        and for `LabLauncher` the sweeper's batch size. Raises PastHydra, with a ConfigError as its cause, if a job
        cannot run.
        """
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        plan = compose.plan_sweep(config, GlobalHydra.instance().config_loader())
        _exit_if_no_override(config.hydra)
        first = plan.jobs[0]
        ours = [typed for typed in first.overrides if typed.partition("=")[0] in OF_SWEEPS]
        if ours and launcher != LAUNCHER:
            raise ConfigError(
                f"{ours[0]} works with hydra/launcher={LAUNCHER} only, and hydra/launcher={launcher} was given. "
                "Leave one of the two out."
            )
        is_here = first.config.launcher == "local" and launcher in (LAUNCHER, *HERE)
        CheckJobs.plan = _check_and_claim(plan, is_here=is_here)
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = str(self.plan.directory)
            # Other launchers compose their jobs again from these words.
            config.hydra.overrides.hydra.append(hydra_override("hydra.sweep.dir", str(self.plan.directory)))
            if launcher == LAUNCHER:  # it runs all jobs of the plan in place of the first
                config.hydra.sweeper.max_batch_size = 1

    @past_hydra()
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Override Hydra's hook after a sweep's last job: print how each job ended; exit with the sweep's exit code."""
        sys.exit(scheduler.summarize(self.plan))


@hydra.main(version_base=VERSION_BASE, config_path=str(package_data("conf")), config_name="config")
def run(cfg: DictConfig) -> int:
    """Start the run that Hydra composed as `cfg`, and wait for its end. Hydra calls this.

    A single run is checked, gets its directory, and ends this process with its exit code. A job of a sweep, which
    `CheckJobs` has checked, returns its exit code. It comes here only with another hydra/launcher than `lab`.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        with past_hydra(), open_dict(cfg):
            cfg.hydra = hydra_config
            plan = compose.plan_run(cfg, GlobalHydra.instance().config_loader())
            _exit_if_no_override(hydra_config)
            plan = _check_and_claim(plan, is_here=True)
            sys.exit(_start(RunDirectory(plan.directory)))
    directory = RunDirectory(Path(hydra_config.runtime.output_dir))
    words = list(hydra_config.overrides.task)
    typed = TypedCommand(command_line(words), overrides_of_runs(words), jobs.sweep_name(Path(hydra_config.sweep.dir)))
    try:
        return _start(directory, typed)
    except ConfigError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return USAGE


def _exit_if_no_override(hydra_config: Any) -> None:
    """Print the overview and exit if no override was typed, as the command does without arguments.

    `hydra_config` is the section `hydra` of what Hydra composed.
    """
    if not hydra_config.overrides.task:
        print(manual.overview())
        sys.exit(OK)


def _start(run: RunDirectory, typed: TypedCommand | None = None) -> int:
    """Start or resume a run and wait, as `launch.start`; print how it ended if it is not done; return the exit code."""
    code = launch.start(run, typed)
    if code == FAILURE:
        print(launch.failure_message(run), file=sys.stderr)
    elif code == INTERRUPTED:
        saved, resume = f"{run.last_saved()} of {run.config().steps}", resume_override(format_path(run.path))
        line = f"{python_command()} -m qerl_lab {resume}"
        print(f"interrupted; {saved} steps are saved. Continue with\n  {line}", flush=True)
    return code


def _split_flags_from_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into Hydra's flags with their values, and overrides (`key=value`).

    Raises ConfigError for an unknown flag. Hydra refuses a wrong value of a flag.
    """
    flags, overrides, left = list[str](), list[str](), list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-"):
            overrides.append(word)
            continue
        if word.partition("=")[0] not in (*FLAGS, *FLAGS_WITH_VALUE):
            raise unknown_flag_error(word, _what_to_type_by_name(), [*FLAGS, *FLAGS_WITH_VALUE])
        flags.append(word)
        if word in FLAGS_WITH_VALUE and left and ("=" not in left[0] or os.path.exists(left[0])):
            flags.append(left.pop(0))
    return flags, overrides


def _what_to_type_by_name() -> dict[str, str]:
    """Map each name that people type with dashes to what to type instead: --rank, --lora.rank and --lora_r are one key.

    The names are keys and groups, their last parts, and names that other libraries use.
    """
    names = [*TYPES, *GROUPS]
    targets = {name.rpartition(".")[2]: name for name in reversed(names)}  # reversed: the first key of a name wins
    targets |= dict(FOREIGN_NAMES) | {name: name for name in names}
    typed = {name: what_to_type(target) for name, target in targets.items()}
    typed |= {"dry_run": "dry_run=true", "experiment": "+experiment=NAME", "resume": "resume=RUN_DIR"}
    of_hydra = ("config_path", "cp", "config_name", "cn")  # long and short
    return typed | dict.fromkeys(of_hydra, "--config-dir DIR to add options of your own")


def _resume(flags: list[str], typed: dict[str, str]) -> int:
    """Resume the run or the sweep in the directory `resume`, or extend a finished run to `steps`. Return the exit code.

    `typed` maps the keys that the user typed, `resume` and perhaps `steps` and `jobs_per_gpu`, to their values. Raises
    ConfigError if the run or sweep cannot continue, or if other keys or `flags` were typed.
    """
    given = unquoted(typed.pop("resume"))
    added = {key: typed.pop(key) for key in ("steps", "jobs_per_gpu") if key in typed}
    if others := [*flags, *(f"{key}={value}" for key, value in typed.items())]:
        raise ConfigError(
            f"resume continues a run with its own configuration, so {' '.join(others)} cannot be typed with it. "
            f"Type {resume_override(given)} alone, with steps=N to extend a finished run, or with jobs_per_gpu=N if "
            "other runs share its GPU. For jobs=N or launcher=NAME of a sweep, type the line that began the sweep."
        )
    if not given.strip():  # a variable of the shell that is not set; as a path it would be this directory
        raise ConfigError("resume= is empty; allowed: the directory of a run or a sweep. Type resume=RUN_DIR.")
    for key, text in added.items():
        number = int(text) if text.isdecimal() else text
        field = field_of_key(key)
        check_type(key, field, number)
        check_bounds(key, field.metadata, number)
    directory = Path(given).expanduser().absolute()
    run, command = RunDirectory(directory), command_line()
    if plan := jobs.plan_of_sweep(directory):
        if added:
            words = " ".join(f"{key}={text}" for key, text in added.items())
            raise ConfigError(
                f"{words} is for one run here, and resume={directory} is a sweep. Leave it out; for another "
                "jobs_per_gpu type the line that began the sweep."
            )
        plan = _check_jobs(plan, is_here=plan.jobs[0].config.launcher == "local")
        print(manual.opening_lines(plan), flush=True)
        scheduler.run(plan, command)
        return scheduler.summarize(plan)
    if "steps" in added:
        jobs.extend_run(run, int(added["steps"]))
    elif run.status == "done":
        raise _finished_run_error(run)
    else:
        preflight.check(run.config(), directory)
    if "jobs_per_gpu" in added:
        run.share_gpu(int(added["jobs_per_gpu"]))
    return _start(run, TypedCommand(command))


def _finished_run_error(run: RunDirectory) -> ConfigError:
    """Return the error for resuming a finished run: how to extend it, or how to write its result files again."""
    made = run.config().steps
    more = (
        f"Add steps={2 * made} to extend the run, start a new run, or move DONE out of its directory to "
        "write result files again that are damaged or missing."
    )
    return ConfigError(
        f"resume={run.path}: this run is already finished (it has a DONE file). "
        f"{more if run.last_saved() == made else 'It kept no checkpoint to go on from: start a new run.'}"
    )


def command_line(overrides: Sequence[str] | None = None) -> str:
    """Return the command line `python -m qerl_lab ...` as typed, with secrets hidden.

    The arguments are `overrides` if given, else the arguments of this process.
    """
    return redact_and_join(["python", "-m", "qerl_lab", *(sys.argv[1:] if overrides is None else overrides)])


def _check_and_claim(plan: Plan, *, is_here: bool) -> Plan:
    """Check all jobs of a command, create their directories, print its first lines; return the plan with final paths.

    Continues an earlier sweep of the same jobs in its directories (`jobs.continue_sweep`). A dry run prints a table and
    exits instead. `is_here` says that the jobs run on this machine. Raises ConfigError if a job cannot run, or a
    directory is in use.
    """
    is_dry = any(job.config.dry_run for job in plan.jobs)
    plan = _check_jobs(jobs.continue_sweep(plan), is_here=is_here, is_dry=is_dry)
    if plan.directory_is_fixed and not plan.multirun:
        RunDirectory(plan.directory).refuse_used()
    if is_dry:
        print(manual.dry_run_table(plan))
        sys.exit(OK)
    plan = jobs.claim_directories(plan, command_line())
    print(manual.opening_lines(plan), flush=True)
    return plan


def _check_jobs(plan: Plan, *, is_here: bool, is_dry: bool = False) -> Plan:
    """Check every unfinished job and the claims of new jobs; return the plan with notes for the user in its jobs.

    If the jobs run on this machine (`is_here`), also checks its hardware. If they run on a cluster, also checks the
    flags of sbatch, and that this machine can submit jobs. A dry run (`is_dry`) only notes what this machine lacks,
    because the run may be meant for another machine. Raises ConfigError for claims with a mistake, and for the first
    job that could not start.
    """
    checked, first = [], plan.jobs[0].config
    uses_this_machine = is_here and not is_dry
    _check_claims(plan)
    for job in plan.jobs:
        run = RunDirectory(job.run_dir)
        if job.begun and run.status == "done":
            checked.append(job)
            continue
        try:
            config = run.config() if job.begun else job.config  # moved questions are needed where they were
            notes = [*job.notes, *preflight.check(config, job.run_dir, is_here=uses_this_machine)]
        except ConfigError as error:
            where = f"job {job.number} ({' '.join(job.overrides)}): " if plan.multirun else ""
            raise ConfigError(f"{where}{error}") from None
        try:
            if is_dry and is_here:
                notes += preflight.check_machine(config, job.run_dir)
            elif is_dry and first.launcher != "local":
                cluster.check_can_submit(first)
        except ConfigError as error:
            notes.append(f"not on this machine: {error}")
        checked.append(replace(job, notes=notes))
    if uses_this_machine:
        scheduler.gpu_pool_of([job.config for job in plan.jobs])
    if first.launcher == "slurm":
        cluster.time_limit_minutes(cluster.parse_sbatch_flags(first.slurm))
    if first.launcher != "local" and not is_dry:
        cluster.check_can_submit(first)
    return replace(plan, jobs=checked)


def _check_claims(plan: Plan) -> None:
    """Raise ConfigError if the claims that new jobs are to test (`preregistration`) have a mistake.

    Once runs have begun it is too late: they record the file's hash, and a corrected file has another.
    """
    for file in dict.fromkeys(job.config.preregistration for job in plan.jobs if not job.begun):
        if file is not None:
            from qerl_lab.report import claims  # pandas and scipy take a second

            claims.read(Path(file), format_path(Path(file)), "preregistration")
