"""Wait for what another process or thread does."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def wait_for(condition: Callable[[], T], seconds: float = 120, pause: float = 0.02) -> T:
    """Return the first value of `condition` that is true. Raises AssertionError where there is none in time."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"it did not happen within {seconds:g} s"
        time.sleep(pause)
    return found


def give_time(condition: Callable[[], object], seconds: float = 0.5) -> None:
    """Wait until `condition` is true, or for `seconds`: for what should be so at once unless somebody looks on.

    A profiler that looks at the frames of a running function keeps their tensors alive for that moment.
    """
    with suppress(AssertionError):
        wait_for(condition, seconds, pause=0.001)
