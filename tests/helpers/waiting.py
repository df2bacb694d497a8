"""Wait for another process or thread."""

import time
from collections.abc import Callable
from typing import TypeVar

import psutil

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T], seconds: float = 300, pause: float = 0.02, alive: Callable[[], bool] = lambda: True
) -> T:
    """Return the first true value of `condition`.

    Raises AssertionError after `seconds`, or once the process that should make it true is no longer `alive`.
    """
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert alive(), "the process ended before"
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(pause)
    return found


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process ended, also one that nobody has waited for."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
