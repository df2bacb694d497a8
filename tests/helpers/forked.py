"""Run commands in forked processes, because starting Python takes ten seconds, and signal them at a chosen moment.

multiprocessing has one fork server per process and preloads only the last list given, so all modules are listed here.
"""

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([
    "qerl_lab.train.run", "qerl_lab.report.plots", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store",
    "qerl_lab.evaluate.accuracy_run", "qerl_lab.quantize.quantize_model",
])  # fmt: skip


class Moment(NamedTuple):
    """The `call`th call of a function or "Class.method" of `module`, before or after it acts."""

    module: str
    function: str
    call: int
    after: bool = False
    number: int = signal.SIGKILL  # of the signal


def start(command: Callable[[], int], folder: Path, log: Path, *moment: Any) -> BaseProcess:
    """Fork a process in `folder` that ends with the exit code of `command`; `log` gets its output.

    It may get a signal at the `Moment` of the words `moment`.
    """
    process = SERVER.Process(target=_run, args=(command, folder, log, Moment(*moment) if moment else None))
    process.start()
    return process


def ended(process: BaseProcess) -> int:
    process.join(300)
    assert process.exitcode is not None, "the process hangs"
    return process.exitcode


def run(command: Callable[[], int], folder: Path, *moment: Any) -> int:
    """Start a process as `start` does, with its output in output.txt of `folder`. Return its exit code."""
    return ended(start(command, folder, folder / "output.txt", *moment))


def _run(command: Callable[[], int], folder: Path, log: Path, moment: Moment | None) -> None:
    assert "qerl_lab.train.run" in sys.modules, "the server has not imported what a run needs"
    os.chdir(folder)
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)
    if moment:
        _signal_at(moment)
    sys.exit(command())


def _signal_at(moment: Moment) -> None:
    owner: Any = importlib.import_module(moment.module)
    *path, name = moment.function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def signalled(*args: Any, **keywords: Any) -> Any:
        is_now = next(calls) == moment.call
        if is_now and not moment.after:
            os.kill(os.getpid(), moment.number)
        result = original(*args, **keywords)
        if is_now and moment.after:
            os.kill(os.getpid(), moment.number)
        return result

    setattr(owner, name, signalled)
