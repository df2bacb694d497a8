"""The command line: `python -m qerl_lab [FLAGS] KEY=VALUE ...`. Imports no torch.

    words -> compose.make_plan (every job composed once, checked) -> jobs.claim (its directory made)
          -> jobs.run_sweep -> launch.start (a process per job) -> table

Exit codes: 0 done, 1 a run failed, 2 a configuration error, 130 interrupted.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser  # Hydra's flags have no public list
from omegaconf import DictConfig

import qerl_lab
from qerl_lab import exits, preflight
from qerl_lab.cli import cluster, earlier, extension, jobs, launch, manual, pool
from qerl_lab.cli.compose import VERSION_BASE, Job, Plan, make_plan, register
from qerl_lab.cli.grammar import not_a_flag
from qerl_lab.cli.one_process import refuse_several
from qerl_lab.cli.overrides import spell
from qerl_lab.config.files import package_data
from qerl_lab.config.keys import schema
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import readable, resume_word
from qerl_lab.exits import OK
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import Typed

SCRIPT = "qerl-lab"  # the console script, of pyproject.toml


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    if not words:
        print(manual.overview())
        return OK
    if "--version" in words:
        print(f"{SCRIPT} {qerl_lab.__version__}")
        return OK
    flags, args = _parse(words)
    if args.help:
        print(manual.manual())
        return OK
    refuse_several(os.environ)
    command = redact(shlex.join(["python", "-m", "qerl_lab", *words]))
    if directory := _resumed_directory(args.overrides, flags):
        if (directory / earlier.INDEX).exists():
            return _resume_sweep(directory, command, _steps(args.overrides))
        earlier.refuse_above_runs(directory)
        return _resume(RunDirectory(directory), command, _steps(args.overrides))
    if args.shell_completion:
        return _complete(words)
    if args.hydra_help:
        _show([*flags, *args.overrides])
        return OK
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("--cfg and --info show one job. Leave -m out, and give each key one value.")
    overrides = [readable(spell(word)) for word in args.overrides]
    plan = make_plan(overrides, args.multirun, args.config_dir)
    if args.cfg or args.info:
        _show([*flags, *overrides])
        return OK
    if any(job.config.dry_run for job in plan.jobs):
        print(manual.dry_run_table(_ready(plan)))
        return OK
    with earlier.alone(plan) if plan.multirun else nullcontext():
        plan = jobs.claim(_ready(plan), command)
    print(manual.opening(plan), flush=True)
    return jobs.run_sweep(plan, command) if plan.multirun else jobs.run_alone(plan)


def _parse(words: list[str]) -> tuple[list[str], argparse.Namespace]:
    """Hydra's own flags, and what they mean; flags and overrides may be mixed."""
    parser = get_args_parser()
    parser.allow_abbrev = False  # --experiment would be --experimental-rerun
    parser.error = _refuse_flag  # argparse would print its usage and exit
    args, unknown = parser.parse_known_intermixed_args(words)
    known = [flag for action in parser._actions for flag in action.option_strings]
    if unknown:
        keys = {name: f"{name}=VALUE" for name in schema()}
        keys |= {"dry_run": "dry_run=true", "experiment": "+experiment=NAME", "resume": "resume=RUN_DIR"}
        raise not_a_flag(unknown[0], keys, known)
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} would leave out the schema that every run is checked against. "
                "Type --config-dir DIR to add options of your own to the groups."
            )
    return [word for word in words if word not in args.overrides], args


def _refuse_flag(message: str) -> NoReturn:
    raise ConfigError(f"{message}. Type --help for the flags and keys.")


def _resumed_directory(overrides: list[str], flags: list[str]) -> Path | None:
    given = [word for word in overrides if word.lstrip("+").startswith("resume=")]
    directory = given[-1].partition("=")[2] if given else "null"
    if directory == "null":
        return None
    others = [*flags, *(word for word in overrides if word != given[-1] and not word.startswith("steps="))]
    if others:
        raise ConfigError(
            f"resume continues a run with its own configuration, so {' '.join(others)} cannot stand beside it. "
            f"Type {resume_word(directory)} alone, or with steps=N to extend a finished run; of a sweep the line that "
            "began it takes jobs=N, launcher=NAME and rerun=true."
        )
    if not directory:
        raise ConfigError("resume= names no directory. Type resume=RUN_DIR, for example resume=runs/nvfp4/seed0/TIME.")
    if "://" in directory:  # as a path its password would no longer look like one
        raise ConfigError(f"resume={directory} is an address; allowed: a run directory. Type resume=RUN_DIR.")
    return Path(directory).expanduser().absolute()


def _steps(overrides: list[str]) -> int | None:
    """The steps to which a finished run is to be extended; None where the command names none."""
    given = [word.partition("=")[2] for word in overrides if word.startswith("steps=")]
    if not given:
        return None
    if len(given) > 1 or not given[0].isdecimal():
        raise ConfigError(f"steps={','.join(given)} is not a whole number. Type for example steps=100.")
    return int(given[0])


def _resume(run: RunDirectory, command: str, steps: int | None) -> int:
    was = None
    if steps is not None or run.status != "done":
        _name_modules([run.config()])
    if steps is not None:
        was = extension.extend(run, steps)
    elif run.status != "done":
        preflight.check(run.config(), run.path)
    try:
        code = launch.resume(run, Typed(command))
    except ConfigError:
        if was is not None:
            extension.take_back(run, was)
        raise
    jobs.report(code, run)
    return code


def _resume_sweep(directory: Path, command: str, steps: int | None) -> int:
    if steps is not None:
        raise ConfigError(f"steps={steps} extends one run, and resume={directory} is a sweep. Leave steps out.")
    plan = earlier.read(directory)
    _name_modules([job.config for job in plan.jobs])
    plan = jobs.claim(_foresee(plan), command)
    print(manual.opening(plan), flush=True)
    return jobs.run_sweep(plan, command)


def _name_modules(configs: Sequence[RunConfig]) -> None:
    """Name the files of task.module before one is imported: of a run that goes on its directory says which."""
    for module, digest in dict.fromkeys((cfg.task.module, cfg.task.module_hash) for cfg in configs if cfg.task.module):
        print(f"note: imports task.module={module} (SHA-256 {digest}...)", file=sys.stderr, flush=True)


def _complete(words: list[str]) -> int:
    """Hydra's tab completion, with our schema and with the spelling that its grammar wants in the words before."""
    if not (script := Path(sys.argv[0]).name).startswith(SCRIPT):
        raise ConfigError(f'tab completion is for {SCRIPT}, not {script}. Type: eval "$({SCRIPT} -sc install=bash)"')
    register()
    command, *typed = os.environ.get("COMP_LINE", SCRIPT).split(" ")
    os.environ["COMP_LINE"] = " ".join([command, *map(spell, typed[:-1]), *typed[-1:]])
    _show(words)
    return OK


def _show(words: list[str]) -> None:
    """Let Hydra print what it has for a flag; no job is started."""

    def nothing(cfg: DictConfig) -> None: ...

    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(package_data("conf")), config_name="config")(nothing)()
    finally:
        sys.argv = before


def _ready(plan: Plan) -> Plan:
    """The plan with what earlier commands have of it. Raises ConfigError where it could not start."""
    plan = _foresee(earlier.apart(earlier.reuse(plan)))
    _refuse_used(plan)
    return plan


def _foresee(plan: Plan) -> Plan:
    """The plan whose jobs also note what they cut.

    Raises ConfigError for the first job that could not start, or that is done and whose record is damaged.
    """
    jobs = []
    for job in plan.jobs:
        try:
            cut = _cut(job, plan.is_here)
        except ConfigError as error:
            where = f"job {job.number} ({' '.join(job.overrides)}): " if plan.multirun else ""
            raise ConfigError(f"{where}{error}") from None
        jobs.append(replace(job, notes=[*job.notes, *cut]))
    if plan.is_here:
        pool.cards_of([job.config for job in plan.jobs])
    else:
        cluster.check(plan.jobs[0].config)
    return replace(plan, jobs=jobs)


def _cut(job: Job, is_here: bool) -> list[str]:
    run = RunDirectory(job.run_dir)
    if job.begun and run.status == "done":
        run.refuse_damaged()
        return []
    return preflight.check(job.config, job.run_dir, is_here)


def _refuse_used(plan: Plan) -> None:
    """A sweep's own jobs lie `apart` from what its directory has."""
    if plan.multirun and RunDirectory(plan.directory).is_claimed:
        raise ConfigError(f"hydra.sweep.dir={plan.directory} is the directory of a run. Type another for the sweep.")
    if plan.directory_given and not plan.multirun:
        RunDirectory(plan.jobs[0].run_dir).refuse_used()
