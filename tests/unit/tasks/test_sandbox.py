"""Calls in worker processes: results, limits, and the lifetime of workers."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from qerl_lab.tasks import sandbox
from qerl_lab.tasks.sandbox import call
from waiting import has_ended, wait_for


def call_each(module: str, function: str, calls: Iterable[Sequence[object]], seconds: float) -> list[object]:
    return [call(module, function, arguments, seconds) for arguments in calls]


@pytest.mark.parametrize(("function", "calls", "results"), [
    ("operator.truediv", [(1, 0), (1, 2), ("a", 2), (1, 4)], [None, 0.5, None, 0.25]),  # some raise
    ("builtins.sorted", [([3, 1],), ("b\u2028a\ud800",)], [[1, 3], ["a", "b", "\u2028", "\ud800"]]),
    ("builtins.print", [("4",), ("5",)], [None, None]),  # printed text is no result
    ("os._exit", [(0,), (1,)], [None, None]),
])  # fmt: skip
def test_each_call_has_its_own_result_or_none(function: str, calls: list, results: list) -> None:
    module, _, name = function.partition(".")
    assert call_each(module, name, calls, seconds=5) == results


def test_a_call_without_end_is_none_in_time() -> None:
    """The call is a single C function, which checks no signal, so a limit inside the process would not end it."""
    started = time.monotonic()
    assert call_each("builtins", "pow", [(3, 2), (7, 10**9), (2, 5)], 0.5) == [9, None, 32]
    assert time.monotonic() - started < 60


def test_a_call_that_takes_all_memory_is_none() -> None:
    assert call("resource", "getrlimit", (resource.RLIMIT_AS,), 5)[0] == sandbox.MEMORY_BYTES
    assert call_each("operator", "mul", [([0], 2), ([0], sandbox.MEMORY_BYTES // 8)], 5) == [[0, 0], None]


def test_ctrl_c_in_the_terminal_does_not_reach_the_child() -> None:
    assert call("os", "getsid", (0,), 5) not in (os.getsid(0), None)


def test_a_child_that_cannot_start_is_an_error_and_no_score() -> None:
    with pytest.raises(RuntimeError, match="no_such_module cannot be used in a worker process"):
        call("no_such_module", "f", (1,), 5)


# --- lifetime of workers


def worker_pid() -> int:
    return call("os", "getpid", (), 5)


def test_a_worker_is_kept_for_the_next_call() -> None:
    assert worker_pid() == worker_pid() != os.getpid()


def test_a_worker_killed_between_two_calls_is_replaced() -> None:
    pid = worker_pid()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), 10)  # for all its threads
    assert worker_pid() not in (pid, None)


def test_the_calls_of_several_threads_do_not_mix() -> None:
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda base: call_each("operator", "add", [(base, n) for n in range(9)], 5), range(0, 80, 10))
    assert list(found) == [[base + n for n in range(9)] for base in range(0, 80, 10)]


ORPHANS = """
import os, threading, time
from qerl_lab.tasks.sandbox import call
print(call("os", "getpid", (), 2), flush=True)
threading.Thread(target=call, args=("builtins", "pow", (7, 10**9), 2)).start()
time.sleep(1.5)
if os.fork():
    print("ready", flush=True)
time.sleep(60)  # the fork holds the other ends of the workers' pipes
"""


@pytest.mark.slow
def test_no_worker_outlives_a_parent_that_was_killed() -> None:
    """Neither an idle worker nor one within a call stays, though a fork of the parent keeps their stdin open."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    idle = int(parent.stdout.readline())
    assert parent.stdout.readline() == "ready\n"
    children = psutil.Process(parent.pid).children()
    assert len(children) == 3
    workers = [child for child in children if any("serve" in word for word in child.cmdline())]
    assert idle in [worker.pid for worker in workers]
    parent.kill()
    parent.wait()
    wait_for(lambda: all(map(has_ended, workers)), 10)
    next(child for child in children if child not in workers).kill()
    parent.stdout.close()
