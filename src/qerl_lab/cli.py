"""The command line: `python -m qerl_lab [FLAGS] KEY=VALUE ...`. Imports no torch.

    words -> compose.make_plan (every job composed, checked) -> hydra.main -> launch.start (a process per job) -> table

Hydra starts the jobs, so that its launchers (joblib, submitit) work; what it would do with a bad command or a failed
job is decided here. Exit codes: 0 done, 1 a run failed, 2 a configuration error, 130 interrupted.
"""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from qerl_lab import launch, usage
from qerl_lab.compose import VERSION_BASE, Plan, job_config, make_plan, quoted, spell
from qerl_lab.config import ConfigError, did_you_mean, package_data
from qerl_lab.launch import FAILURE, INTERRUPTED, OK, USAGE

STOP_FILE = "INTERRUPTED"  # in a sweep's directory: no further job starts


def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    try:
        return _main(words)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _main(words: list[str]) -> int:
    if not words:
        print(usage.overview())
        return OK
    flags, args = _parse(words)
    if args.help:
        print(usage.manual())
        return OK
    if directory := _resumed_directory(args.overrides, flags):
        return _report_run(launch.resume(directory), directory)
    if args.hydra_help or args.shell_completion:
        _hydra_main([*flags, *args.overrides], run_job)
        return OK
    if args.multirun and (args.cfg or args.info):
        raise ConfigError("--cfg and --info show one job. Leave -m out, and give each key one value.")
    overrides = [spell(word) for word in args.overrides]
    plan = make_plan(overrides, args.multirun, args.config_dir)
    if args.cfg or args.info:
        _hydra_main([*flags, *overrides], run_job)
        return OK
    for job in plan.jobs if plan.directory_given else []:
        launch.refuse_used(job.run_dir)
    if any(job.config.dry_run for job in plan.jobs):
        print(usage.dry_run_table(plan))
        return OK
    return _run_sweep(plan, [*flags, *overrides]) if plan.multirun else _run_single(plan, [*flags, *overrides])


def _parse(words: list[str]) -> tuple[list[str], argparse.Namespace]:
    """Hydra's own flags, and what they mean; flags and overrides may be mixed."""
    parser = get_args_parser()
    parser.allow_abbrev = False  # --experiment would be --experimental-rerun
    args, unknown = parser.parse_known_intermixed_args(words)
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in unknown:
        key = word.lstrip("-").partition("=")[0].replace("-", "_")
        keys = {"dry_run": "dry_run=true", "experiment": "+experiment=NAME", "resume": "resume=RUN_DIR"}
        hint = f" Type {keys.get(key, f'{key}=VALUE')}." if key in keys or "=" in word else did_you_mean(word, known)
        raise ConfigError(f"{word} is not a flag; keys take no dashes.{hint}")
    for flag in ("config_path", "config_name", "experimental_rerun"):
        if getattr(args, flag):
            raise ConfigError(
                f"--{flag.replace('_', '-')} would leave out the schema that every run is checked against. "
                "Type --config-dir DIR to add options of your own to the groups."
            )
    return [word for word in words if word not in args.overrides], args


def _resumed_directory(overrides: list[str], flags: list[str]) -> Path | None:
    given = [word for word in overrides if word.lstrip("+").startswith("resume=")]
    directory = given[-1].partition("=")[2] if given else "null"
    if directory == "null":
        return None
    others = [*flags, *(word for word in overrides if word != given[-1])]
    if others:
        raise ConfigError(
            f"resume continues a run with its own configuration, so {' '.join(others)} cannot stand beside it. "
            f"Type {given[-1]} alone."
        )
    if not directory:
        raise ConfigError("resume= names no directory. Type resume=RUN_DIR, for example resume=runs/nvfp4/seed0/TIME.")
    return Path(directory).expanduser().absolute()


def _hydra_main(words: list[str], task: Callable[[DictConfig], int]) -> None:
    before = sys.argv
    sys.argv = [before[0], *words]
    try:
        hydra.main(version_base=VERSION_BASE, config_path=str(package_data("conf")), config_name="config")(task)()
    finally:
        sys.argv = before


def _run_single(plan: Plan, words: list[str]) -> int:
    run_dir = plan.directory if plan.directory_given else launch.reserve(plan.directory)
    print(f"run directory: {usage.near(run_dir)}", flush=True)
    codes = []

    def run(cfg: DictConfig) -> int:
        codes.append(_start(cfg, run_dir))
        return codes[-1]

    _hydra_main([*words, f"hydra.run.dir={quoted(str(run_dir))}"], run)
    return _report_run(codes[0], run_dir)


def _report_run(code: int, run_dir: Path) -> int:
    if code == FAILURE:
        print(f"failed: {launch.failure(run_dir)}\n{usage.near(run_dir)}/FAILED has the whole of it", file=sys.stderr)
    return code


def _run_sweep(plan: Plan, words: list[str]) -> int:
    directory = plan.directory if plan.directory_given else launch.reserve(plan.directory)
    jobs = [replace(job, run_dir=directory / job.run_dir.relative_to(plan.directory)) for job in plan.jobs]
    directory.mkdir(parents=True, exist_ok=True)
    stop_file = directory / STOP_FILE
    stop_file.unlink(missing_ok=True)
    print(f"{usage.count(jobs)} in {usage.near(directory)}", flush=True)
    try:
        with _stopping_at_signals(stop_file):
            _hydra_main([*words, f"hydra.sweep.dir={quoted(str(directory))}"], run_job)
    except (KeyboardInterrupt, SystemExit):  # the table comes whatever becomes of a launcher
        pass
    print(usage.sweep_table(jobs, directory))
    found = {launch.status(job.run_dir) for job in jobs}
    if stop_file.exists() or "interrupted" in found:
        return INTERRUPTED
    return OK if found == {"done"} else FAILURE


def run_job(cfg: DictConfig) -> int:
    """One job of a sweep. A launcher may call it in another process; how it went is read from the run directory."""
    job = HydraConfig.get()
    run_dir, stop_file = Path(job.runtime.output_dir), Path(job.sweep.dir).absolute() / STOP_FILE
    if stop_file.exists():
        return INTERRUPTED
    shown = [word for word in job.overrides.task if not word.startswith("+sweeps=")]
    print(f"\njob {job.job.num}: {' '.join(shown)}", flush=True)
    code = _start(cfg, run_dir)
    if code == INTERRUPTED:
        stop_file.touch()
    return _report_run(code, run_dir)


def _start(cfg: DictConfig, run_dir: Path) -> int:
    try:
        return launch.start(job_config(cfg), run_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE


@contextmanager
def _stopping_at_signals(stop_file: Path) -> Iterator[None]:
    """SIGINT or SIGTERM lets running jobs save and starts no other; a second one stops waiting for them."""

    def stop(number: int, frame: FrameType | None) -> None:
        if stop_file.exists():
            raise KeyboardInterrupt
        stop_file.touch()

    with launch.handlers({signal.SIGINT: stop, signal.SIGTERM: stop}):
        yield
