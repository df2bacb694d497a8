"""A run is a child process and a directory: start it, wait for it, and see to it that the directory says how it ended.

The directory holds `resolved.yaml` from the start and, at the end, `DONE` or `FAILED`; a run that was interrupted has
neither, and `resume=RUN_DIR` continues it. A process of its own per run keeps a sweep's jobs from leaking state
(GPU memory, thread settings, peak counters) into each other, and lets a job die without the sweep.
"""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import TextIO

import yaml

from qerl_lab.checks import check_types
from qerl_lab.config import ConfigError, RunConfig, from_dict

OK, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130  # exit codes

# Set for the child where the user's environment does not: a waiting OpenMP thread that spins stalls a second run on
# the same cores for minutes; tokenizers warn at every fork; a lab run reports to nobody but its own MLflow.
CHILD_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}


def start(config: RunConfig, run_dir: Path) -> int:
    """Claim an empty directory for a new run, run it to its end, and return its exit code (0, 1 or 130)."""
    refuse_used(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = replace(config, run_dir=str(run_dir))
    with open(run_dir / "resolved.yaml", "x", encoding="utf-8") as record:
        yaml.safe_dump(asdict(config), record, sort_keys=False)
    return _run(config, run_dir)


def resume(run_dir: Path) -> int:
    """Continue an interrupted, killed or failed run with its own configuration; its exit code (0, 1 or 130)."""
    config = read_resolved(run_dir)
    if (run_dir / "DONE").exists():
        raise ConfigError(
            f"resume={run_dir}: this run is already finished (it has a DONE file). Start a new run instead."
        )
    return _run(config, run_dir)


def read_resolved(run_dir: Path) -> RunConfig:
    """The checked configuration of an existing run directory. Raises ConfigError."""
    path = run_dir / "resolved.yaml"
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} has no resolved.yaml, so it is no run directory. "
            "Type the directory that the run printed, for example runs/nvfp4_aqn/seed0/20260131-120000."
        )
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration; the run was stopped before it began. Start a new run.")
    check_types(values)
    return from_dict(values)


def status(run_dir: Path) -> str:
    """`done`, `failed`, `interrupted` or `not run`, from what the directory holds."""
    for name, word in (("DONE", "done"), ("FAILED", "failed"), ("resolved.yaml", "interrupted")):
        if (run_dir / name).exists():
            return word
    return "not run"


def failure(run_dir: Path) -> str:
    """Why a failed run failed, in a line."""
    return ((run_dir / "FAILED").read_text(encoding="utf-8").splitlines() or ["no reason given"])[0]


def refuse_used(run_dir: Path) -> None:
    """ConfigError unless the directory is missing or empty: two runs never share one."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"the run directory {run_dir} is a file. Type run_dir=DIR with another name.")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            f"the run directory {run_dir} is not empty. "
            f"Type resume={run_dir} alone to continue the run in it, or run_dir=DIR for a new one."
        )


def reserve(directory: Path) -> Path:
    """Make a new directory by this name, or with -2, -3 ... after it where another process was first."""
    candidate, attempt = directory, 1
    while True:
        try:
            candidate.mkdir(parents=True)
            return candidate
        except FileExistsError:
            attempt += 1
            candidate = directory.with_name(f"{directory.name}-{attempt}")


def _run(config: RunConfig, run_dir: Path) -> int:
    with _locked(run_dir) as record:
        if config.run_dir != str(run_dir):  # the directory was moved; in place, because the lock is on the file
            text = yaml.safe_dump(asdict(replace(config, run_dir=str(run_dir))), sort_keys=False)
            record.truncate(record.write(text))
        (run_dir / "FAILED").unlink(missing_ok=True)
        return _settle(run_dir, _wait(child_command(run_dir), _environment(config), record))


@contextmanager
def _locked(run_dir: Path) -> Iterator[TextIO]:
    """Hold the run's resolved.yaml locked. The child inherits the lock, so that it outlives a killed parent."""
    with open(run_dir / "resolved.yaml", "r+", encoding="utf-8") as record:  # NFS locks what may be written only
        try:
            fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another process is running in {run_dir}. Wait for it or stop it first.") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # file systems without locks
                raise
        yield record


def child_command(run_dir: Path) -> list[str]:
    """The process of one run."""
    return [sys.executable, "-m", "qerl_lab.experiment", str(run_dir)]


def _environment(config: RunConfig) -> dict[str, str]:
    threads = {"OMP_NUM_THREADS": str(config.cpu_threads)} if config.cpu_threads > 0 else {}
    return {**CHILD_ENVIRONMENT, **threads, **os.environ}


def _wait(command: list[str], environment: dict[str, str], lock: TextIO) -> int:
    """Run the child to its end and return its status; negative is the signal that killed it.

    The child handles signals (it finishes its step and saves), so the parent only outlasts it. A terminal sends
    SIGINT to both, so here it is ignored; SIGTERM comes to the parent alone and is handed on.
    """
    child: subprocess.Popen[bytes] | None = None
    terminated = False

    def hand_on(number: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        if child is not None:
            child.terminate()

    with handlers({signal.SIGINT: lambda number, frame: None, signal.SIGTERM: hand_on}):
        child = subprocess.Popen(command, env=environment, pass_fds=[lock.fileno()])
        if terminated:  # before there was a child
            child.terminate()
        return child.wait()


@contextmanager
def handlers(wanted: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Python-level handlers, which unlike SIG_IGN the child does not inherit. Only a main thread may set them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settle(run_dir: Path, code: int) -> int:
    """The exit code of a child that ended with `code`; writes FAILED where the child could not."""
    if (run_dir / "DONE").exists():
        return OK
    if code in (INTERRUPTED, -signal.SIGINT, -signal.SIGTERM):
        return INTERRUPTED
    if not (run_dir / "FAILED").exists():
        (run_dir / "FAILED").write_text(_reason(code) + "\n", encoding="utf-8")
    return FAILURE


def _reason(code: int) -> str:
    if code == -signal.SIGKILL:
        return "Killed: signal 9 (SIGKILL) ended the process, as the system does when memory runs out"
    if code < 0:
        return f"Killed: signal {-code} ({signal.strsignal(-code)}) ended the process"
    return f"NoRecord: the process ended with status {code} without writing DONE or FAILED; see its messages"
