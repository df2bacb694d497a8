"""Start the run of a created directory in processes of its own, wait, and read from the directory how the run ended.

A process per run keeps jobs of a sweep from leaking state (GPU memory, thread settings, peak counters) into each other,
and lets a job die without the sweep.
"""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.system import exits, terminal
from qerl_lab.system.exits import FAILURE, OK, SIGNALS, USAGE, stop_signals
from qerl_lab.system.processes import LIBRARY_VARIABLES, rank_variables, refuse_several_processes

LOOK_SECONDS = 0.2  # between two checks of signals, of the stop file and of a run's processes
GRACE_SECONDS = 60.0  # for the other ranks to end by themselves after a rank has died
SAVE_SECONDS = 240.0  # for the processes of a job to save before the cluster kills it
ABORT = "abort"  # content of the stop file
# After a first signal: the time in which another one belongs to the same stop, and so does not abort.
SAME_STOP_SECONDS: Mapping[int, float] = {signal.SIGTERM: 5.0, signal.SIGINT: 0.1, signal.SIGHUP: math.inf}
STOPPING = (
    "stopping: a step under way is finished and saved, held-out questions are left and asked again later "
    "(Ctrl-C again aborts at once)"
)
ABORTING = "aborting: steps after the last checkpoint are lost"

_children: list[subprocess.Popen[bytes]] = []  # the processes of all runs that this process waits for


@dataclass
class StopRequest:
    """State of the requests to stop or abort a run or sweep: signals to this process, and the sweep's stop file.

    The first signal asks to stop, another SIGINT or SIGTERM to abort. One stop may come as several signals, which must
    not abort (SAME_STOP_SECONDS). A closed terminal sends SIGHUP, and its shell sends it again. `srun`, process
    managers and `tools.queue` may send SIGTERM to a process that Ctrl-C or another SIGTERM has reached already.
    `timeout` sends its signal to a process and at once to the group too; nobody types Ctrl-C twice so fast.

    Attributes:
        stop_file: asks to stop while it exists, and to abort if it contains `ABORT`; None for a run outside of a sweep.
        began: when the first signal came, in seconds of `time.monotonic`; None before.
        is_aborted: whether a signal has asked to abort.
    """

    stop_file: Path | None = None
    began: float | None = None
    is_aborted: bool = False

    def receive(self, number: int, frame: FrameType | None = None) -> bool:
        """Record a signal; print its effect to standard error unless it repeats the first. Return whether to abort."""
        now = time.monotonic()
        if self.began is None:
            self.began = now
            exits.say_now(STOPPING)
            return False
        if now < self.began + SAME_STOP_SECONDS[number]:
            return False
        self.is_aborted = True
        exits.say_now(ABORTING)
        return True

    @property
    def stops(self) -> bool:
        """Tell whether a signal or the stop file asks to stop."""
        return self.began is not None or (self.stop_file is not None and self.stop_file.exists())

    @property
    def aborts(self) -> bool:
        """Tell whether a signal or the stop file asks to abort."""
        file = self.stop_file
        return self.is_aborted or (file is not None and file.exists() and file.read_text(encoding="utf-8") == ABORT)


@dataclass(frozen=True)
class SweepJob:
    """A job of a sweep. Calling the object runs the job.

    A cluster may pickle it, and call it again on another machine: a run that has begun resumes. Once `stop_file`
    exists, the run saves and stops after its current step. If the file contains `ABORT`, the run is killed.
    """

    config: RunConfig
    run_dir: Path
    typed: TypedCommand  # recorded in a run that resumes
    stop_file: Path
    variables: Mapping[str, str] = field(default_factory=dict)  # added to the environment of its processes

    def __call__(self) -> str:
        """Run the job until it ends or is stopped. Return a message if it was refused or failed, else "".

        Starts nothing if `stop_file` exists.
        """
        if self.stop_file.exists():
            return ""
        run = RunDirectory(self.run_dir)
        try:
            return failure_message(run) if start(run, self.typed, self) == FAILURE else ""
        except ConfigError as error:
            return f"error: {redact(str(error))}"
        except OSError as error:  # a full disk, before the run's process could say so
            run.fail(f"{type(error).__name__}: {error}")
            return failure_message(run)

    def checkpoint(self) -> Any:
        """Stop the run, wait at most SAVE_SECONDS until it has saved, and return submitit's order to queue it again.

        submitit calls this near the time limit.
        """
        from submitit.helpers import DelayedSubmission

        deadline = time.monotonic() + SAVE_SECONDS
        for child in _children:
            child.terminate()
        for child in _children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.1, deadline - time.monotonic()))
        return DelayedSubmission(self)


def failure_message(run: RunDirectory) -> str:
    """Return why a run failed, then the file with the traceback.

    A full disk and a signal leave no traceback; the text then ends with the command that resumes the run.
    """
    file = run.path / "FAILED"
    text = file.read_text(encoding="utf-8")
    if len(text.splitlines()) > 1:
        return f"failed: {run.reason}\n{terminal.format_path(file)} has the traceback"
    line = f"{terminal.python_command()} -m qerl_lab {resume_override(terminal.format_path(run.path))}"
    return f"failed: {run.reason}. {'Continue' if text else 'Free some space, then continue'} with\n  {line}"


def start(run: RunDirectory, typed: TypedCommand | None = None, sweep_job: SweepJob | None = None) -> int:
    """Start the run of a created directory, or resume it, and wait. Return 0 (done), 1 (failed) or 130 (interrupted).

    Raises ConfigError if the run is refused. Without `typed`, the directory of a refused run is deleted.

    Args:
        typed: the command to record if the run resumes; None for a run that the same command has just created.
        sweep_job: set for a job of a sweep: its variables join the environment, its jobs_per_gpu replaces the run's,
            and the output goes to console.txt.
    """
    config = run.share_gpu(sweep_job.config.jobs_per_gpu) if sweep_job and run.status != "done" else run.config()
    with run.locked() as lock:
        before = run.status
        if before == "done":
            return OK
        if before != "not run":
            try:
                run.check()
                run.starting_point(with_weights=False)
            except ConfigError as error:
                if sweep_job:  # else its sweep would end as interrupted, and the same command would be refused again
                    run.fail(f"ConfigError: {error}\n")
                raise
        threads = {"OMP_NUM_THREADS": str(config.cpu_threads)} if config.cpu_threads > 0 else {}
        added = sweep_job.variables if sweep_job else {}
        shared = {**LIBRARY_VARIABLES, **threads, **os.environ, **added}
        try:
            refuse_several_processes(os.environ)  # a job on a cluster has another environment than the command
            run.begin(typed)
            environments = [shared | variables for variables in rank_variables(config.gpus)]
            ended_with, rank = _run_processes(run, environments, lock, sweep_job)
            code = run.settle(ended_with, f"rank {rank} of {config.gpus}" if config.gpus > 1 else "")
            if code == USAGE:
                raise ConfigError(run.reason.removeprefix("ConfigError: "))
            return code
        except ConfigError:
            if typed is None:  # else its sweep, or resume=RUN_DIR, looks for it again
                run.discard()
            raise


def child_command(run_dir: Path) -> list[str]:
    """Return the command line of a process that trains the run in `run_dir` as a child of this process."""
    return [sys.executable, "-m", "qerl_lab.train", str(run_dir), str(os.getpid())]


def _run_processes(
    run: RunDirectory, environments: list[dict[str, str]], lock: TextIO, sweep_job: SweepJob | None
) -> tuple[int, int]:
    """Run one process per environment, in order of rank. Return exit code and rank of the first process that failed.

    If none failed, the rank is 0. A negative exit code is a signal number, -SIGINT after an abort. Each process
    inherits `lock`, the lock of the run's directory. Signals to this process and the stop file of `sweep_job` stop the
    processes (see `_wait_for_all`). A terminal sends SIGINT and SIGHUP to the processes too, which ignore repeated
    signals.
    """
    children: list[subprocess.Popen[bytes]] = []
    request = StopRequest(sweep_job.stop_file if sweep_job else None)
    with handle_stop_signals(request.receive), run.console.open("ab") if sweep_job else nullcontext() as console:
        with _stop_signals_blocked():
            for environment in environments:
                child = subprocess.Popen(
                    child_command(run.path), env=environment, pass_fds=[lock.fileno()], stdout=console, stderr=console
                )
                children.append(child)
                _children.append(child)
        first_failed = _wait_for_all(children, request)
    rank = first_failed or 0
    return -signal.SIGINT if request.aborts else children[rank].returncode, rank


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """Context manager: block stop signals, so that a process started here gets none before it can handle them.

    A started process inherits the block and lifts it itself (see Stop.on_signals), but keeps SIGUSR2 blocked: Slurm
    sends this signal to the whole job before the time limit, and only the present process may receive it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR2))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait_for_all(children: list[subprocess.Popen[bytes]], request: StopRequest) -> int | None:
    """Wait until all processes have ended. Return the rank of the first that failed; None if none failed.

    If `request` asks to stop, sends SIGTERM to each process once: the process finishes its step and saves. Kills all if
    `request` asks to abort, and GRACE_SECONDS after a failure, because ranks that wait for a failed one never end.
    """
    first_failed, kill_time, is_told = None, math.inf, False
    while running := [child for child in children if child.poll() is None]:
        if first_failed is None:
            first_failed = _first_failed(children)
            if first_failed is not None:
                kill_time = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > kill_time or request.aborts:
            for child in running:
                child.kill()
        elif request.stops and not is_told:
            for child in running:
                child.terminate()
            is_told = True
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(LOOK_SECONDS)
    # A process may have failed after the loop's last check.
    return _first_failed(children) if first_failed is None else first_failed


def _first_failed(children: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank of the ended process that probably failed first, judged by exit code; None if none failed.

    A process that was killed by a signal comes before a process that exited with an error, and SIGABRT after the other
    signals, because the loss of one rank makes the others exit with errors or abort. Of several signals the lowest
    number comes first, of several exit codes the highest.
    """
    codes = {rank: child.returncode for rank, child in enumerate(children) if child.returncode}
    return min(codes, key=lambda rank: (codes[rank] > 0, codes[rank] == -signal.SIGABRT, -codes[rank]), default=None)


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Context manager: call `handler` for each signal that stops a run (`exits.stop_signals`).

    Does nothing outside of the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Children inherit no handler, unlike SIG_IGN.
    before = {number: signal.signal(number, handler) for number in stop_signals()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
