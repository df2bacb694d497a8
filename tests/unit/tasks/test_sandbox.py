"""Calls in a child process: their results, and the limits that end it."""

import json
import os
import resource
import signal
import time

import pytest

from qerl_lab.tasks import sandbox
from qerl_lab.tasks.sandbox import call_each


def test_the_results_come_in_order_and_none_is_shared() -> None:
    assert call_each("operator", "truediv", [(1, 2), (3, 1), (1, 4)], seconds=5) == [0.5, 3.0, 0.25]
    assert call_each("operator", "truediv", [], seconds=5) == []
    assert call_each("builtins", "sorted", [([3, 1],), ("b\u2028a\ud800",)], 5) == [[1, 3], sorted("b\u2028a\ud800")]


def test_a_call_that_raises_is_none_and_the_next_is_made() -> None:
    assert call_each("operator", "truediv", [(1, 0), (1, 2), ("a", 2), (1, 4)], 5) == [None, 0.5, None, 0.25]


def test_a_call_that_ends_its_process_is_none() -> None:
    assert call_each("os", "_exit", [(0,), (1,)], 5) == [None, None]


def test_a_call_without_end_is_none_in_time() -> None:
    """One call of C that looks at no signal: a limit inside the process would wait for years."""
    started = time.monotonic()
    assert call_each("builtins", "pow", [(3, 2), (7, 10**9), (2, 5)], 0.5) == [9, None, 32]
    assert time.monotonic() - started < 60


def test_a_call_that_takes_all_memory_is_none() -> None:
    calls = [(resource.RLIMIT_AS,)]
    assert call_each("resource", "getrlimit", calls, 5)[0][0] == sandbox.MEMORY_BYTES
    assert call_each("operator", "mul", [([0], 2), ([0], sandbox.MEMORY_BYTES // 8)], 5) == [[0, 0], None]


def test_the_limits_are_the_childs_alone() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)
    call_each("operator", "neg", [(1,)], 0.5)
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGPROF)) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_what_a_library_prints_is_no_result() -> None:
    assert call_each("builtins", "print", [("4",), ("5",)], 5) == [None, None]


def test_ctrl_c_in_the_terminal_does_not_reach_the_child() -> None:
    assert call_each("os", "getsid", [(0,)], 5) != [os.getsid(0)]


def test_a_child_that_cannot_start_is_an_error_and_no_score() -> None:
    with pytest.raises(RuntimeError, match="no_such_module cannot be used in a worker process"):
        call_each("no_such_module", "f", [(1,)], 5)


def test_the_arguments_are_json() -> None:
    assert call_each("json", "dumps", [({"a": [1, None]},)], 5) == [json.dumps({"a": [1, None]})]
