"""Check all jobs of a command and claim their directories before the first one starts."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write

from qerl_lab import preflight
from qerl_lab.cli import cluster, compose, jobs, manual, scheduler
from qerl_lab.cli.compose import Plan
from qerl_lab.config.arm import OF_SWEEPS
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.spelling import hydra_override
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.exits import OK

LAUNCHER = "lab"  # our launcher, in hydra_plugins
HERE = ("basic", "joblib", "submitit_local")  # other launchers of Hydra that run jobs on this machine


class PastHydra(BaseException):
    """Carries another exception, its `__cause__`, through Hydra.

    This is a BaseException, because Hydra would log an Exception from a callback, and announce an Exception from a job.
    """


@contextmanager
def past_hydra() -> Iterator[None]:
    """Context manager: re-raise any Exception as `PastHydra`. `train._run_hydra` then raises the original exception."""
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

        `config` is the configuration that Hydra composed for the sweep. Sets its hydra.sweep.dir in place. Raises
        PastHydra if a job cannot run.
        """
        launcher = config.hydra.runtime.choices["hydra/launcher"]
        plan = compose.plan_sweep(config, GlobalHydra.instance().config_loader())
        first = plan.jobs[0]
        ours = [typed for typed in first.overrides if typed.partition("=")[0] in OF_SWEEPS]
        if ours and launcher != LAUNCHER:
            raise ConfigError(
                f"{ours[0]} works with hydra/launcher={LAUNCHER} only, and hydra/launcher={launcher} was given. "
                "Leave one of the two out."
            )
        is_here = first.config.launcher == "local" and launcher in (LAUNCHER, *HERE)
        CheckJobs.plan = check_and_claim(plan, is_here=is_here)
        with read_write(config.hydra), open_dict(config.hydra):
            config.hydra.sweep.dir = str(self.plan.directory)
            # Other launchers compose their jobs again from these words.
            config.hydra.overrides.hydra.append(hydra_override("hydra.sweep.dir", str(self.plan.directory)))

    @past_hydra()
    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Override Hydra's hook after a sweep's last job: print how each job ended; exit with the sweep's exit code."""
        sys.exit(scheduler.finish(self.plan))


def command_line(overrides: Sequence[str] | None = None) -> str:
    """Return the command line `python -m qerl_lab ...` as typed, with secrets hidden.

    The arguments are `overrides` if given, else the arguments of this process.
    """
    return redact(shlex.join(["python", "-m", "qerl_lab", *(sys.argv[1:] if overrides is None else overrides)]))


def check_and_claim(plan: Plan, *, is_here: bool) -> Plan:
    """Check all jobs of a command, create their directories, print its first lines; return the plan with final paths.

    Continues an earlier sweep of the same jobs in its directories (`jobs.continue_sweep`). A dry run prints a table and
    exits instead. `is_here` says that the jobs run on this machine. Raises ConfigError if a job cannot run, or a
    directory is in use.
    """
    is_dry = any(job.config.dry_run for job in plan.jobs)
    plan = check_jobs(jobs.continue_sweep(plan), is_here=is_here, is_dry=is_dry)
    if plan.multirun and RunDirectory(plan.directory).is_claimed:
        raise ConfigError(
            f"hydra.sweep.dir={plan.directory} is the directory of a run. Type another directory for the sweep."
        )
    if plan.directory_given and not plan.multirun:
        RunDirectory(plan.directory).refuse_used()
    if is_dry:
        print(manual.dry_run_table(plan))
        sys.exit(OK)
    plan = jobs.claim_directories(plan, command_line())
    print(manual.opening_lines(plan), flush=True)
    return plan


def check_jobs(plan: Plan, *, is_here: bool, is_dry: bool = False) -> Plan:
    """Check that every unfinished job could start. Return the plan with notes for the user added to its jobs.

    If the jobs run on this machine (`is_here`), also checks its hardware. If they run on a cluster, also checks the
    flags of sbatch, and that this machine can submit jobs. A dry run (`is_dry`) only notes what this machine lacks,
    because the run may be meant for another machine. Raises ConfigError for the first job that could not start.
    """
    checked, first = [], plan.jobs[0].config
    for job in plan.jobs:
        if job.begun and RunDirectory(job.run_dir).status == "done":
            checked.append(job)
            continue
        try:
            notes = [*job.notes, *preflight.check(job.config, job.run_dir, is_here=is_here and not is_dry)]
        except ConfigError as error:
            where = f"job {job.number} ({' '.join(job.overrides)}): " if plan.multirun else ""
            raise ConfigError(f"{where}{error}") from None
        try:
            if is_dry and is_here:
                preflight.check_machine(job.config, job.run_dir)
            elif is_dry and first.launcher != "local":
                cluster.check_can_submit(first)
        except ConfigError as error:
            notes.append(f"not on this machine: {error}")
        checked.append(replace(job, notes=notes))
    if is_here and not is_dry:
        scheduler.gpu_pool_of([job.config for job in plan.jobs])
    if first.launcher == "slurm":
        cluster.time_limit_minutes(cluster.parse_sbatch_flags(first.slurm))
    if first.launcher != "local" and not is_dry:
        cluster.check_can_submit(first)
    return replace(plan, jobs=checked)
