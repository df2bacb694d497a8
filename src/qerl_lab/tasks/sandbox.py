"""A function called in a child process, within limits of time and memory that the kernel keeps.

The text of a model may ask a library for a number with a billion digits. A limit inside the process, as math-verify has
one, acts in the main thread only, and between two of Python's instructions only. The kernel ends a child anywhere.
"""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

MEMORY_BYTES = 4 * 2**30
READY = "ready"
CHILD = "import sys; from qerl_lab.tasks import sandbox; sandbox.serve(*sys.argv[1:])"


def call_each(module: str, function: str, calls: Sequence[Sequence[Any]], seconds: float) -> list[Any]:
    """Results of a module's function for the arguments in `calls`, in order; None where it raises or passes a limit.

    Args:
        module: its full name; the child imports it, this process does not. Arguments and results travel as JSON.
        seconds: CPU time of one call, so that a busy machine decides as an idle one does. Memory is MEMORY_BYTES.

    Raises:
        RuntimeError: the child ends before its first call, e.g. because a package cannot be imported.
    """
    results: list[Any] = []
    while len(results) < len(calls):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, module, function, str(seconds)],
            input="\n".join(json.dumps(list(call)) for call in calls[len(results) :]),
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # the buffers of each thread count as memory
            start_new_session=True,  # Ctrl-C lets a step end, and must not cost a completion its score
            capture_output=True,
            text=True,
        )
        ready, *lines = child.stdout.splitlines() or [""]
        if ready != READY:
            raise RuntimeError(f"{module} cannot be used in a child process:\n{child.stderr[-2000:]}")
        results += map(json.loads, lines)
        results += [None] * (len(results) < len(calls))  # the call at which the child ended
    return results


def serve(module: str, function: str, seconds: str) -> None:
    """Answer the calls on stdin, a line each; the child's whole life."""
    call, answers = getattr(import_module(module), function), sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    allowed = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (allowed, hard))
    print(READY, file=answers, flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, float(seconds))  # nothing handles its signal, which so ends the process
        result = json.dumps(call(*json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(result, file=answers, flush=True)
