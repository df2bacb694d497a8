"""The jobs of a plan: every directory is claimed before the first job starts, and a launcher gets directories alone.

Hydra starts the jobs, so that its launchers (joblib, submitit) and its own settings (`hydra.job.*`) act. It composes
nothing again: what a launcher loads for a directory is what the plan composed.
"""

import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import cast

from hydra._internal.callbacks import Callbacks  # HydraContext takes it, and it has no public name
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import run_job
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, read_write

from qerl_lab import exits
from qerl_lab.cli import earlier, launch, manual, pool
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.cli.overrides import shown
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.disk import replace_file
from qerl_lab.exits import FAILURE, INTERRUPTED, OK, USAGE
from qerl_lab.record.directory import RunDirectory, first_missing, remove_empty, reserve
from qerl_lab.record.environment import Typed

TABLE = "table.txt"  # in a sweep's directory: how its jobs ended
STOP_FILE = "INTERRUPTED"  # in a sweep's directory: no further job starts


def claim(plan: Plan, command: str) -> Plan:
    """Make the directory of every new job, or of none; the plan as it then lies. Raises ConfigError."""
    made = first_missing(plan.directory)
    directory = plan.directory if plan.directory_given else reserve(plan.directory)
    made = made or (None if plan.directory_given else directory)
    jobs = [
        _placed(job, directory, job.run_dir if job.begun else job.run_dir.relative_to(plan.directory))
        for job in plan.jobs
    ]
    sweep = f"{directory.parent.name}/{directory.name}" if plan.multirun else None
    claimed: list[tuple[RunDirectory, Path | None]] = []
    try:
        for job in [job for job in jobs if not job.begun]:
            run, above = RunDirectory(job.run_dir), first_missing(job.run_dir)
            words = list(job.composed.hydra.overrides.task)
            run.claim(replace(job.config, run_dir=str(run.path)), Typed(command, words, sweep))
            claimed.append((run, above))
    except BaseException:
        for run, above in reversed(claimed):
            run.discard(above)
        if directory.is_dir():
            remove_empty(directory, made)
        raise
    placed = replace(plan, jobs=jobs, directory=directory, made=made)
    if plan.sweep is not None:
        with read_write(plan.sweep.hydra):
            plan.sweep.hydra.sweep.dir = str(directory)
        earlier.write(placed)
    return placed


def _placed(job: Job, directory: Path, inside: Path) -> Job:
    """The job in the directory that its command got; Hydra's own settings say so too."""
    hydra, run_dir = job.composed.hydra, directory / inside
    OmegaConf.set_readonly(hydra, None)  # as HydraConfig left it; a launcher numbers its jobs
    hydra.run.dir, hydra.sweep.dir, hydra.sweep.subdir = str(run_dir), str(directory), str(inside)
    return replace(job, run_dir=run_dir)


@dataclass(frozen=True)
class Planned:
    """A loader that composes nothing: for a directory it has what the plan composed."""

    by_directory: dict[str, DictConfig]

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        (run_dir,) = sweep_overrides
        return self.by_directory[run_dir]


def _context(cfg: DictConfig, jobs: list[Job]) -> HydraContext:
    """Make what Hydra wants beside a configuration. Its launchers call one method of a loader: that of `Planned`."""
    loader = Planned({str(job.run_dir): job.composed for job in jobs})
    return HydraContext(cast(ConfigLoader, loader), Callbacks(cfg))


def run_alone(plan: Plan) -> int:
    """Run the only job of a plan to its end; its exit code."""
    (job,) = plan.jobs
    context = _context(job.composed, [])
    context.callbacks.on_run_start(config=job.composed, config_name="config")

    def task(cfg: DictConfig) -> int:
        return _start(RunDirectory(job.run_dir), plan.made)

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
    stop_file.unlink(missing_ok=True)
    with earlier.locked(plan.directory):
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
    print(table)
    found = {RunDirectory(job.run_dir).status for job in plan.jobs}
    if stop_file.exists() or "interrupted" in found:
        return INTERRUPTED
    return OK if found == {"done"} else FAILURE


def _launch(plan: Plan, cfg: DictConfig, command: str) -> None:
    left = [job for job in plan.jobs if RunDirectory(job.run_dir).status != "done"]
    context = _context(cfg, left)
    told = {str(job.run_dir): (job.number, job.begun) for job in left}
    task = partial(run_one, count=len(plan.jobs), command=command, told=told)
    context.callbacks.on_multirun_start(config=cfg, config_name="config")
    if left and left[0].config.jobs > 1:
        pool.run(left, partial(_start_beside, plan=plan, command=command))
    elif left:
        _launch_by_hydra(context, task, cfg, left)
    context.callbacks.on_multirun_end(config=cfg, config_name="config")


def _launch_by_hydra(
    context: HydraContext, task: Callable[[DictConfig], int], cfg: DictConfig, left: list[Job]
) -> None:
    launcher = Plugins.instance().instantiate_launcher(context, task, cfg)
    directories = [[str(job.run_dir)] for job in left]
    batch = cfg.hydra.sweeper.max_batch_size or len(directories)
    for first in range(0, len(directories), batch):
        for returned in launcher.launch(directories[first : first + batch], initial_job_idx=first):
            _ = returned.return_value  # raises what the job raised


def _start_beside(job: Job, variables: Mapping[str, str], plan: Plan, command: str) -> int:
    """Start a job beside others: what it prints goes to its directory, and Hydra's settings of a job do as usual."""
    run, stop_file = RunDirectory(job.run_dir), plan.directory / STOP_FILE
    if stop_file.exists():
        return INTERRUPTED
    own = {str(name): str(value) for name, value in job.composed.hydra.job.env_set.items()} | dict(variables)
    label = f"job {job.number} ({job.number + 1} of {len(plan.jobs)})"
    of = launch.OfSweep(stop_file, label, own, run.console)
    sweep = f"{plan.directory.parent.name}/{plan.directory.name}"
    return _start(run, run.path, of, Typed(command, job.overrides, sweep) if job.begun else None)


def run_one(cfg: DictConfig, count: int, command: str, told: Mapping[str, tuple[int, bool]]) -> int:
    """Run one of the `count` jobs of a sweep, perhaps in another process of a launcher; its exit code.

    `told` has, by run directory, a job's number and whether an earlier command began it.
    """
    if multiprocessing.parent_process() is not None:  # a worker of a launcher: the console of the command is its own
        exits.outlast()
    hydra = HydraConfig.get()
    run, stop_file = RunDirectory(Path(hydra.runtime.output_dir)), Path(hydra.sweep.dir) / STOP_FILE
    if stop_file.exists():
        return INTERRUPTED
    number, begun = told[str(run.path)]
    words, sweep = shown(hydra.overrides.task), Path(hydra.sweep.dir)
    label = f"job {number} ({number + 1} of {count})"
    print(f"\n{label}: {' '.join(words)}", flush=True)
    typed = Typed(command, words, f"{sweep.parent.name}/{sweep.name}") if begun else None
    code = _start(run, run.path, launch.OfSweep(stop_file, label), typed)
    if code == INTERRUPTED:
        stop_file.touch()
    return code


def _start(
    run: RunDirectory, made: Path | None, of: launch.OfSweep | None = None, typed: Typed | None = None
) -> int:  # fmt: skip
    """Start a claimed run, or with `typed` go on with one; wait for its end and say what it was."""
    try:
        code = launch.resume(run, typed, of) if typed else launch.start(run, made, of)
    except ConfigError as error:  # here, because Hydra would say more of it
        print(f"error: {redact(str(error))}", file=sys.stderr)
        return USAGE
    report(code, run)
    return code


def report(code: int, run: RunDirectory) -> None:
    """Say how a run ended that is not done."""
    if code == FAILURE:
        print(f"failed: {run.reason}\n{manual.near(run.path)}/FAILED has the whole of it", file=sys.stderr)
    elif code == INTERRUPTED:
        print(manual.interrupted(run), flush=True)


@contextmanager
def _stopping_at_signals(stop_file: Path) -> Iterator[None]:
    """A signal lets running jobs save and starts no other; a second SIGINT stops waiting for them."""

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if stop_file.exists():
                stop_file.write_text(launch.ABORT, encoding="utf-8")
                exits.say_now(launch.ABORTING)
                raise KeyboardInterrupt
            exits.say_now(launch.STOPPING)
        stop_file.touch()

    with launch.handlers(stop):
        yield
