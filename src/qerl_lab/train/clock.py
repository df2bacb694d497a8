"""Seconds of each phase of a step, on a device that works on after a call has returned."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Wall time by phase since the last `clear`. `wait` returns when the device has done all that it was given.

    `waited` tells the seconds that this process has spent so far in waiting for the run's other processes. They count
    for no phase: `end_step` notes those of a step as "wait".
    """

    def __init__(self, wait: Callable[[], None], waited: Callable[[], float] = lambda: 0.0) -> None:
        self.wait, self.waited = wait, waited
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_started, self._waited_before = 0.0, 0.0

    def own_time(self) -> float:
        """Wall time in seconds, which stands still while this process waits for others."""
        return time.perf_counter() - self.waited()

    @contextmanager
    def phase(self, name: str, on_device: bool = True) -> Iterator[None]:
        """Add the own time inside to a phase. A phase `on_device` ends when the device does."""
        started = self.own_time()
        yield
        if on_device:
            self.wait()
        self.seconds[name] += self.own_time() - started

    def start_step(self) -> None:
        self._step_started, self._waited_before = time.perf_counter(), self.waited()

    def end_step(self) -> None:
        """Note the seconds of the step, its last backward pass and optimizer update included."""
        self.wait()
        self.seconds["step"] = time.perf_counter() - self._step_started
        self.seconds["wait"] = self.waited() - self._waited_before

    def clear(self) -> None:
        self.seconds.clear()
