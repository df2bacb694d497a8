"""The command line: `python -m qerl_lab [FLAGS] KEY=VALUE ...`. Imports no torch.

    arguments -> hydra.main -> check (every job checked, its directory claimed) -> launch.start (a run), or
              -> hydra_plugins.qerl_lab_launcher -> scheduler.run (a process per job) -> table

Exit codes: 0 done, 1 a run failed, 2 a configuration error, 130 interrupted.
"""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

import qerl_lab
from qerl_lab import preflight
from qerl_lab.cli import check, compose, jobs, launch, manual, scheduler
from qerl_lab.cli.compose import VERSION_BASE, register_schema
from qerl_lab.cli.grammar import unknown_flag_error
from qerl_lab.cli.intent import overrides_by_key
from qerl_lab.cli.overrides import (
    GROUPS,
    as_config_errors,
    parse_overrides,
    spell_for_hydra,
    without_hydra_overrides,
)
from qerl_lab.config.conf_folder import package_data
from qerl_lab.config.keys import FOREIGN_NAMES, types_by_key, what_to_type
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.spelling import resume_override, unquoted
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import Typed
from qerl_lab.system import exits
from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK, USAGE
from qerl_lab.system.processes import refuse_several_processes

SCRIPT = "qerl-lab"  # the console script in pyproject.toml
FLAGS = ("--help", "-h", "--hydra-help", "--resolve", "--run", "-r", "--multirun", "-m", "--shell-completion", "-sc")
FLAGS_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--config-dir", "-cd")


@hydra.main(version_base=VERSION_BASE, config_path=str(package_data("conf")), config_name="config")
def run(cfg: DictConfig) -> int:
    """Start the run that Hydra composed as `cfg`, and wait for its end. Hydra calls this.

    Exits this process with the run's exit code. For a job of a sweep it returns the exit code instead. Jobs of
    hydra/launcher=lab do not come here.
    """
    hydra_config = HydraConfig.get()
    if hydra_config.mode != RunMode.MULTIRUN:
        with check.past_hydra(), open_dict(cfg):
            cfg.hydra = hydra_config
            plan = check.check_and_claim(compose.plan_run(cfg, GlobalHydra.instance().config_loader()), is_here=True)
            directory = RunDirectory(plan.directory)
            sys.exit(_print_unfinished(launch.start(directory, made=plan.made), directory))
    directory = RunDirectory(Path(hydra_config.runtime.output_dir))
    words = list(hydra_config.overrides.task)
    typed = Typed(
        check.command_line(words), without_hydra_overrides(words), jobs.sweep_name(Path(hydra_config.sweep.dir))
    )
    try:
        return _print_unfinished(launch.start(directory, typed), directory)
    except ConfigError as error:
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return USAGE


def _print_unfinished(code: int, run: RunDirectory) -> int:
    """Print how a run ended if it failed or was interrupted; return `code` unchanged."""
    if code == FAILURE:
        print(launch.failure_message(run), file=sys.stderr)
    elif code == INTERRUPTED:
        print(manual.interrupted_message(run), flush=True)
    return code


@exits.command
def main(arguments: list[str]) -> int:
    """Run the command `python -m qerl_lab` with these arguments; print errors; return the exit code."""
    if not arguments:
        print(manual.overview())
        return OK
    if "--version" in arguments:
        print(f"{SCRIPT} {qerl_lab.__version__}")
        return OK
    flags, overrides = _split_flags_from_overrides(arguments)
    if {"--help", "-h"} & set(flags):
        print(manual.help_text())
        return OK
    refuse_several_processes(os.environ)
    if "resume" in (given := overrides_by_key(overrides)):
        return _resume(flags, given)
    if {"--shell-completion", "-sc"} & set(flags):
        _prepare_completion()
        return _run_hydra([*flags, *overrides])
    overrides = [spell_for_hydra(word) for word in overrides]
    parse_overrides(overrides)
    with as_config_errors():
        return _run_hydra([*flags, *overrides])


def _run_hydra(arguments: list[str]) -> int:
    """Start Hydra with these arguments; Hydra then calls `run`. Return the exit code."""
    register_schema()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    before, sys.argv = sys.argv, [sys.argv[0], *arguments]
    try:
        run()
    except check.PastHydra as left:
        raise left.__cause__ or left from None
    except SystemExit as ended:
        return int(ended.code or OK)
    finally:
        sys.argv = before
    return OK


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
            raise unknown_flag_error(word, _hints_by_name(), [*FLAGS, *FLAGS_WITH_VALUE])
        flags.append(word)
        if word in FLAGS_WITH_VALUE and left and "=" not in left[0]:
            flags.append(left.pop(0))
    return flags, overrides


def _hints_by_name() -> dict[str, str]:
    """Map names that users may type with dashes by mistake, such as `lr`, to what to type instead."""
    names = [*types_by_key(), *GROUPS]
    targets = {name.rpartition(".")[2]: name for name in reversed(names)}
    targets |= dict(FOREIGN_NAMES) | {name: name for name in names}
    hints = {name: what_to_type(target) for name, target in targets.items()}
    hints |= {"dry_run": "dry_run=true", "experiment": "+experiment=NAME", "resume": "resume=RUN_DIR"}
    return hints | dict.fromkeys(("config_path", "config_name"), "--config-dir DIR to add options of your own")


def _resume(flags: list[str], typed: dict[str, str]) -> int:
    """Resume the run or the sweep in the directory `resume`, or extend a finished run to `steps`; return the exit code.

    `typed` maps typed keys to their values. Raises ConfigError if the run or sweep cannot continue, or if anything else
    was typed.
    """
    given, steps = unquoted(typed.pop("resume")), typed.pop("steps", None)
    if others := [*flags, *(f"{key}={value}" for key, value in typed.items())]:
        raise ConfigError(
            f"resume continues a run with its own configuration, so {' '.join(others)} cannot be typed with it. "
            f"Type {resume_override(given)} alone, or with steps=N to extend a finished run. For jobs=N or "
            "launcher=NAME of a sweep, type the line that began the sweep."
        )
    if steps is not None and not steps.isdecimal():
        raise ConfigError(f"steps={steps} is not a whole number. Type for example steps=100.")
    directory = Path(given).expanduser().absolute()
    run, command = RunDirectory(directory), check.command_line()
    if plan := jobs.plan_of_sweep(directory):
        if steps is not None:
            raise ConfigError(f"steps={steps} extends one run, and resume={directory} is a sweep. Leave steps out.")
        plan = check.check_jobs(plan, is_here=plan.jobs[0].config.launcher == "local")
        print(manual.opening_lines(plan), flush=True)
        scheduler.run(plan, command)
        return scheduler.finish(plan)
    if steps is not None:
        jobs.extend_run(run, int(steps))
    elif run.status == "done":
        made = run.config().steps
        more = f"Add steps={2 * made} to extend the run, or start a new run."
        raise ConfigError(
            f"resume={directory}: this run is already finished (it has a DONE file). "
            f"{more if run.last_saved() == made else 'It kept no checkpoint to continue from: start a new run.'}"
        )
    else:
        preflight.check(run.config(), directory)
    return _print_unfinished(launch.start(run, Typed(command)), run)


def _prepare_completion() -> None:
    """Respell the command line that the shell completes (COMP_LINE) for Hydra's grammar.

    Raises ConfigError unless this process was started as `qerl-lab`.
    """
    if not (script := Path(sys.argv[0]).name).startswith(SCRIPT):
        raise ConfigError(f'tab completion is for {SCRIPT}, not {script}. Type: eval "$({SCRIPT} -sc install=bash)"')
    command, *typed = os.environ.get("COMP_LINE", SCRIPT).split(" ")
    os.environ["COMP_LINE"] = " ".join([command, *map(spell_for_hydra, typed[:-1]), *typed[-1:]])
