"""The jobs of a plan: every directory is claimed before the first job starts, and what runs a job gets that alone.

Nothing is composed again. Of Hydra's own settings the callbacks of a run and of a sweep act, and `hydra.job.env_set`.
"""

import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import cast

from hydra._internal.callbacks import Callbacks  # HydraContext takes it, and it has no public name
from hydra.core.config_loader import ConfigLoader
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, read_write

from qerl_lab import exits
from qerl_lab.cli import cluster, earlier, launch, manual, pool
from qerl_lab.cli.call import Call, Outcome
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.cli.live import Live
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.disk import replace_file
from qerl_lab.exits import FAILURE, INTERRUPTED, OK, USAGE
from qerl_lab.record.directory import RunDirectory, first_missing, remove_empty, reserve
from qerl_lab.record.environment import Typed

TABLE = "table.txt"  # in a sweep's directory: how its jobs ended
STOP_FILE = "INTERRUPTED"  # in a sweep's directory: no further job starts
LOOK_SECONDS = {"local": 0.1, "ray": 0.1, "slurm": 2.0}  # between two looks for jobs that have ended


def claim(plan: Plan, command: str) -> Plan:
    """Make the directory of every new job, or of none; the plan as it then lies.

    Raises ConfigError, also where another command runs a sweep in its directory.
    """
    made = first_missing(plan.directory)
    directory = plan.directory if plan.directory_given else reserve(plan.directory)
    made = made or (None if plan.directory_given else directory)
    jobs = [
        _placed(job, directory, job.run_dir if job.begun else job.run_dir.relative_to(plan.directory))
        for job in plan.jobs
    ]
    placed = replace(plan, jobs=jobs, directory=directory, made=made)
    lock = directory / earlier.LOCK
    is_first = not lock.exists()
    try:
        with earlier.locked(directory) if plan.multirun else nullcontext():
            _claim_each(placed, command)
            if plan.sweep is not None:
                with read_write(plan.sweep.hydra):
                    plan.sweep.hydra.sweep.dir = str(directory)
                earlier.write(placed)
    except BaseException:
        if directory.is_dir():
            if is_first:
                lock.unlink(missing_ok=True)
            remove_empty(directory, made)
        raise
    return placed


def _claim_each(plan: Plan, command: str) -> None:
    sweep = f"{plan.directory.parent.name}/{plan.directory.name}" if plan.multirun else None
    claimed: list[tuple[RunDirectory, Path | None]] = []
    try:
        for job in [job for job in plan.jobs if not job.begun]:
            run, above = RunDirectory(job.run_dir), first_missing(job.run_dir)
            words = list(job.composed.hydra.overrides.task)
            run.claim(replace(job.config, run_dir=str(run.path)), Typed(command, words, sweep))
            claimed.append((run, above))
    except BaseException:
        for run, above in reversed(claimed):
            run.discard(above)
        raise


def _placed(job: Job, directory: Path, inside: Path) -> Job:
    """The job in the directory that its command got; Hydra's own settings say so too."""
    hydra, run_dir = job.composed.hydra, directory / inside
    OmegaConf.set_readonly(hydra, None)  # as HydraConfig left it
    hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir = str(run_dir), str(directory), str(inside)
    return replace(job, run_dir=run_dir)


def _context(cfg: DictConfig) -> HydraContext:
    """Make what Hydra wants beside a configuration. It composes nothing more, so that no loader is needed."""
    return HydraContext(cast(ConfigLoader, None), Callbacks(cfg))


def run_alone(plan: Plan) -> int:
    """Run the only job of a plan to its end; its exit code."""
    (job,) = plan.jobs
    context = _context(job.composed)
    context.callbacks.on_run_start(config=job.composed, config_name="config")

    def task(cfg: DictConfig) -> int:
        run = RunDirectory(job.run_dir)
        try:
            code = launch.start(run, plan.made)
        except ConfigError as error:  # here, because Hydra would say more of it
            print(f"error: {redact(str(error))}", file=sys.stderr)
            return USAGE
        report(code, run)
        return code

    returned = run_job(task, job.composed, "hydra.run.dir", None, context)
    context.callbacks.on_run_end(config=job.composed, config_name="config", job_return=returned)
    return cast(int, returned.return_value)


def run_sweep(plan: Plan, command: str) -> int:
    """Run every job of a plan that is not done, until a signal stops them; tell how all ended, and keep the table.

    `command` is what was typed. Returns the exit code of them all: 0 done, 1 one failed or never began, 130
    interrupted. Raises ConfigError where another command runs them.
    """
    assert plan.sweep is not None
    stop_file = plan.directory / STOP_FILE
    with earlier.locked(plan.directory):
        stop_file.unlink(missing_ok=True)  # one that another command runs keeps its own
        try:
            with _stopping_at_signals(stop_file):
                _launch(plan, plan.sweep, command)
        except KeyboardInterrupt:
            pass  # the table comes after the second Ctrl-C too
        except ConfigError:
            raise
        except Exception:  # the boundary: whatever becomes of a launcher, the directories say how the jobs ended
            traceback.print_exc()
        table = manual.sweep_table(plan)
        if earlier.is_whole(plan):
            replace_file(plan.directory / TABLE, f"{table.lstrip()}\n".encode())
        found = {RunDirectory(job.run_dir).status for job in plan.jobs}
        if found == {"done"}:
            stop_file.unlink(missing_ok=True)  # of a signal that came when the last job was ending
    print(table)
    if stop_file.exists() or "interrupted" in found:
        return INTERRUPTED
    return OK if found == {"done"} else FAILURE


def _launch(plan: Plan, cfg: DictConfig, command: str) -> None:
    left = [job for job in plan.jobs if RunDirectory(job.run_dir).status != "done"]
    context = _context(cfg)
    context.callbacks.on_multirun_start(config=cfg, config_name="config")
    if left:
        stop_file = plan.directory / STOP_FILE
        words = dict(zip([job.number for job in plan.jobs], manual.own_words(plan.jobs)[1], strict=True))
        shown = Live([(job, " ".join(words[job.number])) for job in left], len(plan.jobs), stop_file)
        with _handed_on(left, plan, command) as outcomes:
            _follow(dict(zip(outcomes, left, strict=True)), shown, stop_file)
    context.callbacks.on_multirun_end(config=cfg, config_name="config")


def _handed_on(jobs: Sequence[Job], plan: Plan, command: str) -> AbstractContextManager[Sequence[Outcome]]:
    configs, calls = [job.config for job in jobs], [_call(job, plan, command) for job in jobs]
    match configs[0].launcher:
        case "slurm":
            return cluster.slurm(configs, calls, plan.directory / "slurm")
        case "ray":
            return cluster.ray(configs, calls)
        case _:
            return pool.local(configs, calls)


def _follow(waiting: dict[Outcome, Job], shown: Live, stop_file: Path) -> None:
    """Show the jobs until the last has ended; after a stop none is waited for that has not begun."""
    while waiting:
        shown.update()
        for outcome, job in list(waiting.items()):
            if outcome.done():
                del waiting[outcome]
                shown.end(job, _said(outcome, RunDirectory(job.run_dir)))
            elif stop_file.exists() and not shown.is_running(job):
                outcome.cancel()
                del waiting[outcome]
        time.sleep(LOOK_SECONDS[next(iter(waiting.values())).config.launcher] if waiting else 0)
    shown.close()


def _call(job: Job, plan: Plan, command: str) -> Call:
    """The job as it is handed on. What it prints goes to its directory, and Hydra's settings of a job act."""
    own = {str(name): str(value) for name, value in job.composed.hydra.job.env_set.items()}
    label = f"job {job.number} ({job.number + 1} of {len(plan.jobs)})"
    of = launch.OfSweep(plan.directory / STOP_FILE, label, own, RunDirectory(job.run_dir).console)
    return Call(job.run_dir, of, Typed(command, job.overrides, f"{plan.directory.parent.name}/{plan.directory.name}"))


def _said(outcome: Outcome, run: RunDirectory) -> str:
    """What there is to say of a job that has ended, beside its status."""
    if error := outcome.exception():  # a bug, or what became of it on a cluster; the other jobs go on
        return "".join(traceback.format_exception(error)).rstrip()
    code, refusal = outcome.result()
    return refusal or (_failure(run) if code == FAILURE else "")


def _failure(run: RunDirectory) -> str:
    return f"failed: {run.reason}\n{manual.near(run.path)}/FAILED has the whole of it"


def report(code: int, run: RunDirectory) -> None:
    """Say how a run ended that is not done."""
    if code == FAILURE:
        print(_failure(run), file=sys.stderr)
    elif code == INTERRUPTED:
        print(manual.interrupted(run), flush=True)


@contextmanager
def _stopping_at_signals(stop_file: Path) -> Iterator[None]:
    """A signal lets running jobs save and starts no other; a second SIGINT stops waiting for them."""

    def stop(number: int, frame: FrameType | None) -> None:
        exits.STOPS.append(number)
        if number == signal.SIGINT:
            if stop_file.exists():
                stop_file.write_text(launch.ABORT, encoding="utf-8")
                exits.say_now(launch.ABORTING)
                raise KeyboardInterrupt
            exits.say_now(launch.STOPPING)
        stop_file.touch()

    with launch.handlers(stop):
        yield
