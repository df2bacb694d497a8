"""Call a function in a worker process with time and memory limits enforced by the kernel.

A model's text may ask a library for a number with a billion digits. A limit inside the process, such as math-verify's,
works only in the main thread and between Python instructions. The kernel ends a worker anywhere.

A worker starts when first needed and is kept for the next call, because importing a library takes a second. A worker
ends when this process ends, even if this process is killed: its input closes, and it checks whether it is orphaned.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from qerl_lab.config.units import GIB
from qerl_lab.system.processes import end_with_parent

MEMORY_BYTES = 2 * GIB  # address space of a worker
START_SECONDS, WALL_FACTOR = 120.0, 30.0  # wall-time limits; a call that does not block stays below
READY = b"ready\n"
CHILD = "import sys; from qerl_lab.tasks import sandbox; sandbox.serve(*sys.argv[1:])"
Worker = subprocess.Popen[bytes]

_kept: dict[tuple[str, str, float], Worker] = {}
_one_at_a_time = threading.Lock()


def call(module: str, function: str, arguments: Sequence[Any], seconds: float) -> Any:
    """Call a function in a worker process; return its result.

    The result is None if the call raised an error or exceeded a limit: `seconds` of CPU time, MEMORY_BYTES of memory,
    or WALL_FACTOR * (`seconds` + 1) of wall time. Only the worker imports `module`. Arguments and result must be
    JSON. Any thread may call; one call runs at a time. Raises RuntimeError if no worker can start.
    """
    key = (module, function, seconds)
    with _one_at_a_time:
        worker, answer = _kept.pop(key, None), b""
        if worker is None or worker.poll() is not None:  # none yet, or killed between two calls
            worker = _start(*key)
        try:
            with suppress(BrokenPipeError):  # the worker has ended
                worker.stdin.write(json.dumps(list(arguments)).encode() + b"\n")  # type: ignore[union-attr]
                worker.stdin.flush()  # type: ignore[union-attr]
                answer = worker.stdout.readline()  # type: ignore[union-attr]
        finally:  # after any error too: a half-read answer must not reach the next call
            if answer.endswith(b"\n"):
                _kept[key] = worker
            else:
                worker.kill()
                worker.communicate()
    return json.loads(answer) if answer.endswith(b"\n") else None


def _start(module: str, function: str, seconds: float) -> Worker:
    """Start a worker for one function, with `seconds` of CPU time per call, and wait until it is ready.

    Raises RuntimeError, with the end of the worker's error output, if it does not start.
    """
    worker = subprocess.Popen(
        [sys.executable, "-c", CHILD, module, function, str(seconds), str(os.getpid())],
        env=os.environ | {"OMP_NUM_THREADS": "1"},  # each thread's buffers count as memory
        start_new_session=True,  # shield the worker from Ctrl-C, which only ends the run after the step
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    if worker.stdout.readline() != READY:  # type: ignore[union-attr]
        errors = worker.communicate()[1].decode(errors="replace")[-2000:]
        raise RuntimeError(f"{module} cannot be used in a worker process:\n{errors}")
    return worker


def serve(module: str, function: str, seconds: str, parent: str) -> None:
    """Serve calls of `module.function`, as the main loop of a worker process started by `_start`.

    Each line of standard input is a JSON list of arguments. The answer is one line of JSON on standard output: the
    result, or null if the call raised an error. Signals end this process if a call takes `seconds` of CPU time, or
    `WALL_FACTOR` * (`seconds` + 1) of wall time. The process also ends if a call needs too much memory, and when the
    process with the id `parent` ends.
    """
    signal.setitimer(signal.ITIMER_REAL, START_SECONDS)  # the signals of both timers are not handled: they end it
    call = getattr(import_module(module), function)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    end_with_parent(int(parent))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    answers.write(READY)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # a library's prints must not mix with answers or fill a pipe
        os.dup2(nowhere, stream)
    signal.setitimer(signal.ITIMER_REAL, 0)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))
        signal.setitimer(signal.ITIMER_REAL, WALL_FACTOR * (float(seconds) + 1))
        try:
            result = json.dumps(call(*json.loads(line)))
        except MemoryError:
            raise  # a fresh worker has its memory again
        except Exception:  # any other error means no result, including RecursionError
            result = "null"
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        answers.write(f"{result}\n".encode())
