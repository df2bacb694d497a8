"""Run the jobs of a sweep: on this machine's cores and shares of its GPUs, on Slurm, or on Ray."""

import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from qerl_lab.cli import cluster, jobs, launch, manual
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.cli.launch import SweepJob
from qerl_lab.cli.live import SweepProgress
from qerl_lab.config.arm import OF_SWEEPS
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight import machine
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.system.disk import replace_file
from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK

TABLE = "table.txt"  # in a sweep's directory: how its jobs ended
STOP_FILE = "INTERRUPTED"  # in a sweep's directory: while it exists, no job starts
LOOK_SECONDS = {"local": 0.1, "ray": 0.1, "slurm": 2.0}  # between two checks for jobs that have ended


def run(plan: Plan, command: str, variables: Mapping[str, str] | None = None) -> None:
    """Run all jobs of a sweep that are not done. Return when all have ended or a signal has stopped the sweep.

    A signal creates STOP_FILE, so that running jobs save and stop, and no other job starts. A second one writes ABORT
    into it, so that running jobs are killed (`launch.StopRequest`). `command` is the typed line, recorded in runs that
    resume. `variables` are added to the environment of the jobs. Raises ConfigError if another command runs this sweep.
    """
    stop_file, sweep = plan.directory / STOP_FILE, jobs.sweep_name(plan.directory)
    left = [job for job in plan.jobs if RunDirectory(job.run_dir).status != "done"]
    sweep_jobs = list[SweepJob]()
    for job in left:  # with the settings that its directory records, but run as typed now
        as_typed = {key: getattr(job.config, key) for key in OF_SWEEPS}
        config = replace(RunDirectory(job.run_dir).config(), **as_typed)
        typed = TypedCommand(command, job.overrides, sweep)
        sweep_jobs.append(SweepJob(config, job.run_dir, typed, stop_file, variables or {}))

    request = launch.StopRequest()

    def stop_jobs(number: int, frame: FrameType | None) -> None:
        if request.receive(number, frame):
            stop_file.write_text(launch.ABORT, encoding="utf-8")
            raise KeyboardInterrupt
        stop_file.touch()

    with jobs.locked_sweep(plan.directory), suppress(KeyboardInterrupt):  # of an abort
        stop_file.unlink(missing_ok=True)  # under the lock: the stop file of another command stays
        if not left:
            return
        submitted: AbstractContextManager[Sequence[Any]]
        match sweep_jobs[0].config.launcher:
            case "slurm":
                submitted = cluster.submit_to_slurm(sweep_jobs, plan.directory / "slurm")
            case "ray":
                submitted = cluster.submit_to_ray(sweep_jobs)
            case _:
                submitted = run_locally(sweep_jobs)
        with launch.handle_stop_signals(stop_jobs):
            progress = SweepProgress(plan.jobs, left, stop_file)
            with submitted as futures:
                _show_until_done(dict(zip(futures, left, strict=True)), progress, stop_file)


def _show_until_done(waiting: dict[Any, Job], progress: SweepProgress, stop_file: Path) -> None:
    """Show the progress of jobs until all have ended. Once `stop_file` exists, cancel the jobs that have not begun.

    `waiting` maps the future of each job to the job; ended jobs are removed from it.
    """
    while waiting:
        progress.update()
        for future, job in list(waiting.items()):
            if future.done():
                if error := future.exception():  # of the lab or the cluster: a failed job returns a message
                    message = redact("".join(traceback.format_exception(error)).rstrip())
                else:
                    message = future.result()
                progress.end_job(job, message)
                del waiting[future]
            elif stop_file.exists() and not progress.is_running(job) and future.cancel() is not False:
                del waiting[future]  # False: a job of this machine that has begun, perhaps without a record yet
        time.sleep(LOOK_SECONDS[next(iter(waiting.values())).config.launcher] if waiting else 0)
    progress.close()


def summarize(plan: Plan) -> int:
    """Print a table of how the jobs of a sweep ended, and save it in the sweep's directory. Return the exit code.

    The code is 0 if all jobs are done, 130 after an interruption, else 1. With 0 it also deletes STOP_FILE.
    """
    table, stop_file = manual.sweep_table(plan), plan.directory / STOP_FILE
    replace_file(plan.directory / TABLE, f"{table.lstrip()}\n".encode())
    print(table)
    statuses = {RunDirectory(job.run_dir).status for job in plan.jobs}
    if statuses == {"done"}:
        stop_file.unlink(missing_ok=True)  # from a signal that came while the last job ended
        return OK
    return INTERRUPTED if stop_file.exists() or "interrupted" in statuses else FAILURE


class GpuPool:
    """The GPUs of this machine. On each GPU up to `share` jobs run at once.

    `names` are the GPUs as in CUDA_VISIBLE_DEVICES. A job shares a GPU only if no GPU is idle.
    """

    def __init__(self, names: Sequence[str], share: int) -> None:
        self._room = dict.fromkeys(names, share)  # jobs that may still start on each GPU
        self._changed = threading.Condition()
        self._one_takes = threading.Lock()  # two jobs that each hold one of two GPUs would wait forever

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        """Context manager: wait until `count` GPUs can each take one more job, and hold them.

        Yields the names of the GPUs for CUDA_VISIBLE_DEVICES.
        """
        taken = list[str]()
        with self._one_takes, self._changed:
            while len(taken) < count:
                self._changed.wait_for(lambda: any(self._room.values()))
                taken.append(max(self._room, key=self._room.__getitem__))  # the GPU with the fewest jobs
                self._room[taken[-1]] -= 1
        try:
            yield taken
        finally:
            with self._changed:
                for name in taken:
                    self._room[name] += 1
                self._changed.notify()


def gpu_pool_of(configs: Sequence[RunConfig]) -> GpuPool | None:
    """Return a pool of this machine's GPUs for jobs that run at once.

    Returns None without a GPU, or if the jobs run one at a time or all on the CPU. Raises ConfigError if nvidia-smi
    does not list the GPUs.
    """
    if configs[0].jobs == 1 or all(cfg.device == "cpu" for cfg in configs) or not machine.has_gpu():
        return None
    names = machine.visible_gpus()
    if names is None:
        raise ConfigError(f"nvidia-smi does not list the GPUs here. Type {machine.VISIBLE}=0,1 before the command.")
    return GpuPool(names, configs[0].jobs_per_gpu)


@contextmanager
def run_locally(sweep_jobs: Sequence[SweepJob]) -> Iterator[list[Future[str]]]:
    """Context manager: start the jobs of a sweep on this machine; yield a future for each, in order.

    The key `jobs` says how many run at once. A future returns a message if its job was refused or failed, else "". If
    several jobs run at once, each GPU job waits for `gpus` GPUs of the pool and sees only these. Leaving the context
    waits for all jobs.
    """
    gpu_pool = gpu_pool_of([sweep_job.config for sweep_job in sweep_jobs])

    def run_on_gpus(sweep_job: SweepJob) -> str:
        """Run a job, on GPUs from the pool unless it runs on the CPU; return its message (see `SweepJob`)."""
        if gpu_pool is None or sweep_job.config.device == "cpu":
            return sweep_job()
        with gpu_pool.take(sweep_job.config.gpus) as taken:
            return replace(sweep_job, variables={**sweep_job.variables, machine.VISIBLE: ",".join(taken)})()

    with ThreadPoolExecutor(sweep_jobs[0].config.jobs) as pool:
        yield [pool.submit(run_on_gpus, sweep_job) for sweep_job in sweep_jobs]
