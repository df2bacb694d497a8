"""Run the job of a claimed directory in a process of its own, and read from the directory how it ended.

A process per run keeps jobs of a sweep from leaking state (GPU memory, thread settings, peak counters) into each other,
and lets a job die without the sweep.
"""

import io
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import Typed
from qerl_lab.system import exits, terminal
from qerl_lab.system.exits import OK, SIGNALS, USAGE, stop_signals
from qerl_lab.system.processes import rank_variables, refuse_several_processes

LOOK_SECONDS = 1.0  # between two checks of the stop file and of the ranks
GRACE_SECONDS = 60.0  # for the other ranks to end by themselves after one has died
SAVE_SECONDS = 240.0  # for the processes of a job to save before the cluster kills it
ABORT = "abort"  # content of the stop file
STOPPING = "stopping: the step under way ends and is saved (Ctrl-C again aborts at once)"
ABORTING = "aborting: what came after the last checkpoint is lost"

# Defaults for the child's environment. A spinning OpenMP thread stalls a second run on the same cores for minutes;
# tokenizers warn at every fork; vLLM logs its whole configuration; usage statistics stay off.
CHILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # of transformers and TRL, which import MLflow before the first step
}
_children: list[subprocess.Popen[bytes]] = []  # the processes of all runs that this process waits for


@dataclass(frozen=True)
class SweepJob:
    """Settings of a run that is a job of a sweep, whose output goes to its console.txt.

    The run stops after its step once `stop_file` exists, and at once if that contains `ABORT`: the file may be created
    on another machine. `label` names the run on the terminal, `variables` are added to its environment (its GPUs).
    """

    stop_file: Path
    label: str
    variables: Mapping[str, str]


def start(
    run: RunDirectory, typed: Typed | None = None, sweep_job: SweepJob | None = None, made: Path | None = None
) -> int:
    """Start the run of a claimed directory, or resume it, and wait; return its exit code (0, 1 or 130).

    `typed` is recorded in a run that resumes. Raises ConfigError if the run cannot use its configuration. A run that
    never began then leaves no directory, nor its parents up to `made`.
    """
    config = run.config()
    with run.locked() as lock:
        before = run.status
        if before == "done":
            return OK
        if before != "not run":
            run.check()
            with redirect_stderr(io.StringIO()):  # the child prints what it skips
                run.starting_point(config)
        typed = run.begin() or typed
        try:
            refuse_several_processes(os.environ)  # a job on a cluster has another environment than the command
            return _run_processes(run, typed, lock, sweep_job)
        except ConfigError:
            if before == "not run":
                run.discard(made)
            raise


def _run_processes(run: RunDirectory, typed: Typed | None, lock: TextIO, sweep_job: SweepJob | None) -> int:
    """Run the processes of a run to their end; return the run's exit code. Raises ConfigError."""
    config = run.config()
    threads = {"OMP_NUM_THREADS": str(config.cpu_threads)} if config.cpu_threads > 0 else {}
    environment = {
        **CHILD_ENVIRONMENT, **threads, **os.environ, **(sweep_job.variables if sweep_job else {}),
        **(typed.variables() if typed else {}), terminal.JOB: sweep_job.label if sweep_job else "",
    }  # fmt: skip
    environments = [environment | variables for variables in rank_variables(config.gpus)]
    ended_with, rank = _start_and_wait(run, environments, lock, sweep_job)
    code = run.settle(ended_with, f"rank {rank} of {config.gpus}" if config.gpus > 1 else "")
    if code == USAGE:
        raise ConfigError(run.reason.removeprefix("ConfigError: "))
    return code


def child_command(run_dir: Path) -> list[str]:
    """Return the command line that starts a training process of the run."""
    return [sys.executable, "-m", "qerl_lab.train", str(run_dir), str(os.getpid())]


def _start_and_wait(
    run: RunDirectory, environments: list[dict[str, str]], lock: TextIO, sweep_job: SweepJob | None
) -> tuple[int, int]:
    """Run a process per environment to its end; return exit status and rank of the first that failed.

    A negative status is a signal number. A signal is forwarded as SIGTERM, upon which the processes finish their step
    and save; the second SIGINT kills them. A terminal also sends SIGINT and SIGHUP to the children, to no effect, so
    the parent alone counts signals.
    """
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def is_aborted() -> bool:
        return received.count(signal.SIGINT) > 1 or _abort_requested(sweep_job.stop_file if sweep_job else None)

    def forward_signal(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.kill() if is_aborted() else child.terminate()
        if number == signal.SIGINT:
            exits.say_now(ABORTING if is_aborted() else STOPPING)

    with handle_stop_signals(forward_signal):
        with run.console.open("ab") if sweep_job else nullcontext() as console:
            children += _start_processes(child_command(run.path), environments, lock, console)
        if received:  # while they started
            for child in children:
                child.terminate()
        rank = _wait_for_children(children, sweep_job.stop_file if sweep_job else None)
    return -signal.SIGINT if is_aborted() else children[rank].returncode, rank


def _start_processes(
    command: list[str], environments: list[dict[str, str]], lock: TextIO, console: BinaryIO | None
) -> list[subprocess.Popen[bytes]]:  # fmt: skip
    """Start a process for each environment. Each inherits the lock of the run's directory."""
    # Block signals during the start, so that none reaches a child that cannot handle it yet; see Stop.on_signals.
    # Slurm sends SIGUSR2 to the whole job before its time limit; only this process may receive it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR2))
    try:
        started = [
            subprocess.Popen(command, env=environment, pass_fds=[lock.fileno()], stdout=console, stderr=console)
            for environment in environments
        ]
        _children.extend(started)
        return started
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_children() -> None:
    """Stop the processes of all runs, let them save, and wait for them. Called by a signal handler."""
    deadline = time.monotonic() + SAVE_SECONDS
    for child in _children:
        child.terminate()
    for child in _children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(max(0.1, deadline - time.monotonic()))


def _wait_for_children(children: list[subprocess.Popen[bytes]], stop_file: Path | None) -> int:
    """Wait for every process; return the first failed rank, or 0. Kill the others GRACE_SECONDS after a failure."""
    first, deadline = None, math.inf
    is_single = len(children) == 1 and stop_file is None
    while running := [child for child in children if child.poll() is None]:
        if first is None and (first := _first_failed(children)) is not None:
            deadline = time.monotonic() + GRACE_SECONDS
        if time.monotonic() > deadline or _abort_requested(stop_file):
            for child in running:
                child.kill()
        elif stop_file is not None and stop_file.exists():
            for child in running:
                child.terminate()
        with suppress(subprocess.TimeoutExpired):
            running[0].wait(None if is_single else LOOK_SECONDS)
    first = _first_failed(children) if first is None else first
    return 0 if first is None else first


def _abort_requested(stop_file: Path | None) -> bool:
    return stop_file is not None and stop_file.exists() and stop_file.read_text(encoding="utf-8") == ABORT


def _first_failed(children: list[subprocess.Popen[bytes]]) -> int | None:
    """Return the rank of the process that probably failed first, judged by the exit statuses; None if none failed."""
    codes = {rank: child.returncode for rank, child in enumerate(children) if child.returncode}
    return min(codes, key=lambda rank: (codes[rank] > 0, -codes[rank]), default=None)


@contextmanager
def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context manager: let `handler` receive the signals that stop a run, if this is the main thread."""
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
