"""Seconds of each phase of a step, on a device that works on after a call has returned."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Wall time by phase since the last `clear`. `wait` returns when the device has done all that it was given."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_started = 0.0

    @contextmanager
    def phase(self, name: str, on_device: bool = True) -> Iterator[None]:
        """Add the time inside to a phase. A phase `on_device` ends when the device does."""
        started = time.perf_counter()
        yield
        if on_device:
            self.wait()
        self.seconds[name] += time.perf_counter() - started

    def start_step(self) -> None:
        self._step_started = time.perf_counter()

    def end_step(self) -> None:
        """Note the seconds of the step, its last backward pass and optimizer update included."""
        self.wait()
        self.seconds["step"] = time.perf_counter() - self._step_started

    def clear(self) -> None:
        self.seconds.clear()
