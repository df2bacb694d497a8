"""A function called in worker processes, within limits of time and memory that the kernel keeps.

The text of a model may ask a library for a number with a billion digits. A limit inside the process, as math-verify has
one, acts in the main thread only, and between two of Python's instructions only. The kernel ends a worker anywhere.

Workers start when they are first needed and are kept for the next batch: a library takes a second to import. They end
with this process however it ends: their input ends with it, and each looks whether it has been orphaned.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from qerl_lab.config.units import GIB
from qerl_lab.processes import end_with

MEMORY_BYTES = 2 * GIB  # of a worker's addresses; one call may not take more
KEPT_BYTES = 2**29  # a worker that holds more resident memory is not kept
MOST_WORKERS, CALLS_A_WORKER = 4, 16  # a batch of fewer calls is not worth a second start
START_SECONDS, WALL_FACTOR = 120.0, 30.0  # wall time: a call that waits for nothing cannot take so much longer
READY = "ready"
CHILD = "import sys; from qerl_lab.tasks import sandbox; sandbox.serve(*sys.argv[1:])"


class Ended(Exception):
    """A worker ended, or was ended, before it answered."""


def call_each(module: str, function: str, calls: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
    """Results of a module's function for the arguments in `calls`, in order; None where it raises or passes a limit.

    It may be called from any thread, and from several.

    Args:
        module: its full name; the workers import it, this process does not. Arguments and results travel as JSON.
        seconds: CPU time of one call, so that a busy machine decides as an idle one does. Memory is MEMORY_BYTES.

    Raises:
        RuntimeError: a worker cannot start, e.g. because a package cannot be imported.
    """
    results: list[Any] = [None] * len(calls)
    left = deque(range(len(calls)))  # of the calls, which all threads take from

    def work() -> None:
        worker: Worker | None = None
        try:
            while left:
                worker = worker or take(module, function, seconds)
                worker = _next(worker, calls, left, results)
        except BaseException:  # a half-read answer must not become the next call's
            if worker is not None:
                worker.end()
            raise
        if worker is not None:
            give_back(worker)

    threads = min(MOST_WORKERS, os.cpu_count() or 1, -(-len(calls) // CALLS_A_WORKER))
    if threads <= 1:
        work()
        return results
    with ThreadPoolExecutor(threads, "sandbox") as pool:
        for done in [pool.submit(work) for _ in range(threads)]:
            done.result()
    return results


def _next(worker: "Worker", calls: Sequence[Sequence[Any]], left: deque[int], results: list[Any]) -> "Worker | None":
    """Make the next call, if another thread has not; the worker, or None where it may not be kept."""
    try:
        n = left.popleft()
    except IndexError:
        return worker
    try:
        results[n], keep = worker.call(calls[n])
    except Ended:
        keep = False
    if not keep:
        worker.end()
    return worker if keep else None


@dataclass
class Worker:
    """A process that answers calls of one function, a line each."""

    module: str
    function: str
    seconds: float
    process: "subprocess.Popen[bytes]" = field(init=False)
    rest: bytes = b""

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, self.module, self.function, str(self.seconds), str(os.getpid())],
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # the buffers of each thread count as memory
            start_new_session=True,  # Ctrl-C lets a step end, and must not cost a completion its score
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            ready = self.line(START_SECONDS)
        except Ended:
            ready = b""
        if ready.decode() != READY:
            self.process.kill()
            said = self.process.communicate()[1].decode(errors="replace")[-2000:]
            raise RuntimeError(f"{self.module} cannot be used in a worker process:\n{said}")

    def call(self, arguments: Sequence[Any]) -> tuple[Any, bool]:
        """The result, and whether the worker may be kept. Raises Ended."""
        try:
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError as error:
            raise Ended from error
        result, keep = json.loads(self.line(WALL_FACTOR * (self.seconds + 1)))
        return result, keep

    def line(self, seconds: float) -> bytes:
        """The next line that the worker writes within a wall time. Raises Ended."""
        pipe = self.process.stdout.fileno()  # type: ignore[union-attr]
        until, poll = time.monotonic() + seconds, select.poll()
        poll.register(pipe, select.POLLIN)
        while b"\n" not in self.rest:
            ready = poll.poll(1000 * max(0.0, until - time.monotonic()))
            more = os.read(pipe, 1 << 16) if ready else b""
            if not more:
                raise Ended
            self.rest += more
        found, _, self.rest = self.rest.partition(b"\n")
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            pipe.close()  # type: ignore[union-attr]


_idle: dict[tuple[str, str, float], list[Worker]] = defaultdict(list)
_lock = threading.Lock()


def take(module: str, function: str, seconds: float) -> Worker:
    """An idle worker, or a new one."""
    with _lock:
        idle = _idle[module, function, seconds]
        worker = idle.pop() if idle else None
    if worker is not None and worker.process.poll() is not None:  # it was killed between two batches
        worker.end()
        worker = None
    return worker or Worker(module, function, seconds)


def give_back(worker: Worker) -> None:
    """Keep a worker for the next batch."""
    with _lock:
        idle = _idle[worker.module, worker.function, worker.seconds]
        if len(idle) < MOST_WORKERS:
            idle.append(worker)
            return
    worker.end()


def end_all() -> None:
    """For tests: end the idle workers. A later call starts new ones."""
    with _lock:
        workers = [worker for idle in _idle.values() for worker in idle]
        _idle.clear()
    for worker in workers:
        worker.end()


def _forget() -> None:
    """In a process that was forked: the workers answer the other one, whose threads may have held the lock."""
    global _lock
    _lock = threading.Lock()
    _idle.clear()


os.register_at_fork(after_in_child=_forget)


def serve(module: str, function: str, seconds: str, parent: str) -> None:
    """Answer the calls on stdin, a line each; a worker's whole life."""
    call = getattr(import_module(module), function)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    end_with(int(parent))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    answers.write(READY.encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # what a library prints is no answer, and must not fill a pipe
        os.dup2(nowhere, stream)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # nothing handles its signal, which so ends the process
        result = _result(call, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        keep = _resident_bytes() < KEPT_BYTES
        answers.write(f"[{result}, {json.dumps(keep)}]\n".encode())


def _resident_bytes() -> int:
    """What this process holds now. Its `ru_maxrss` would be that of the trainer, from which it was forked."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _result(call: Callable[..., Any], line: bytes) -> str:
    try:
        return json.dumps(call(*json.loads(line)))
    except Exception:  # no result, whatever the library raises: RecursionError and MemoryError too
        return "null"
