"""Call a function in worker processes with time and memory limits enforced by the kernel.

A model's text may ask a library for a number with a billion digits. A limit inside the process, such as math-verify's,
works only in the main thread and between Python instructions. The kernel ends a worker anywhere.

Workers start when first needed and are kept for the next batch, because importing a library takes a second. They end
with this process, however it ends: their input closes, and each checks whether it is orphaned.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from qerl_lab.config.units import GIB
from qerl_lab.system.processes import end_with_parent

MEMORY_BYTES = 2 * GIB  # address space of a worker
KEPT_BYTES = 2**29  # a worker with more resident memory is not kept
MOST_WORKERS, CALLS_A_WORKER = 4, 16  # start another worker per 16 calls
START_SECONDS, WALL_FACTOR = 120.0, 30.0  # wall-time limits; a call that does not block stays below
READY = "ready"
CHILD = "import sys; from qerl_lab.tasks import sandbox; sandbox.serve(*sys.argv[1:])"


class Ended(Exception):
    """A worker ended, or was killed, before it answered."""


def call_each(module: str, function: str, calls: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
    """Call a module's function for each argument list in `calls`; None where it raises or exceeds a limit.

    Results are in order. Can be called from any thread, and from several.

    Args:
        module: full name; only the workers import it. Arguments and results are passed as JSON.
        seconds: CPU time limit of one call, independent of machine load. The memory limit is MEMORY_BYTES.

    Raises:
        RuntimeError: a worker cannot start, e.g. because a package cannot be imported.
    """

    def call(arguments: Sequence[Any]) -> Any:
        worker, keep = take_worker(module, function, seconds), False
        try:
            result, keep = worker.call(arguments)
            return result
        except Ended:
            return None
        finally:  # after any other error too: a half-read answer must not reach the next call
            if keep:
                _idle[module, function, seconds].append(worker)
            else:
                worker.end()

    threads = min(MOST_WORKERS, os.cpu_count() or 1, -(-len(calls) // CALLS_A_WORKER))
    if threads <= 1:
        return [call(arguments) for arguments in calls]
    with ThreadPoolExecutor(threads, "sandbox") as pool:
        return list(pool.map(call, calls))


@dataclass
class Worker:
    """A process that answers calls of one function, one per line."""

    module: str
    function: str
    seconds: float
    process: "subprocess.Popen[bytes]" = field(init=False)
    rest: bytes = b""

    def __post_init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD, self.module, self.function, str(self.seconds), str(os.getpid())],
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # each thread's buffers count as memory
            start_new_session=True,  # shield the worker from Ctrl-C, which only ends the run after the step
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
        """Return the result and whether to keep the worker. Raises Ended."""
        try:
            self.process.stdin.write(json.dumps(list(arguments)).encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        except BrokenPipeError as error:
            raise Ended from error
        result, keep = json.loads(self.line(WALL_FACTOR * (self.seconds + 1)))
        return result, keep

    def line(self, seconds: float) -> bytes:
        """Return the next line that the worker writes within `seconds` of wall time. Raises Ended."""
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


_idle: dict[tuple[str, str, float], list[Worker]] = defaultdict(list)  # threads only append and pop, which is atomic


def take_worker(module: str, function: str, seconds: float) -> Worker:
    """Return an idle worker or start one."""
    try:
        worker = _idle[module, function, seconds].pop()
    except IndexError:
        return Worker(module, function, seconds)
    if worker.process.poll() is None:
        return worker
    worker.end()  # killed between two batches
    return take_worker(module, function, seconds)


def serve(module: str, function: str, seconds: str, parent: str) -> None:
    """Run a worker: answer the calls on stdin, one per line."""
    call = getattr(import_module(module), function)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    end_with_parent(int(parent))
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    answers.write(READY.encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # a library's prints must not mix with answers or fill a pipe
        os.dup2(nowhere, stream)
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # its signal is not handled, so it ends the process
        try:
            result = json.dumps(call(*json.loads(line)))
        except Exception:  # any error means no result, including RecursionError and MemoryError
            result = "null"
        signal.setitimer(signal.ITIMER_PROF, 0)
        # not `ru_maxrss`, which includes the trainer's memory, from which the worker was forked
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        keep = pages * resource.getpagesize() < KEPT_BYTES
        answers.write(f"[{result}, {json.dumps(keep)}]\n".encode())
