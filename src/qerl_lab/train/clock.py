"""Measure seconds by phase of a step, on a device that computes asynchronously."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Clock:
    """Accumulate wall time by phase since the last `clear`.

    `wait` blocks until the device has finished all queued work. `waited` returns the seconds this process has spent
    waiting for other ranks so far. Phases exclude that time; `end_step` stores it as "wait".
    """

    def __init__(self, wait: Callable[[], None], waited: Callable[[], float] = lambda: 0.0) -> None:
        self.wait, self.waited = wait, waited
        self.seconds: dict[str, float] = defaultdict(float)
        self._step_started, self._waited_before = 0.0, 0.0

    def own_time(self) -> float:
        """Return wall time in seconds, without time spent waiting for other ranks."""
        return time.perf_counter() - self.waited()

    @contextmanager
    def phase(self, name: str, on_device: bool = True) -> Iterator[None]:
        """Time the block and add it to phase `name`. With `on_device`, wait for the device before stopping."""
        started = self.own_time()
        yield
        if on_device:
            self.wait()
        self.seconds[name] += self.own_time() - started

    def start_step(self) -> None:
        self._step_started, self._waited_before = time.perf_counter(), self.waited()

    def end_step(self) -> None:
        """Store the seconds of the whole step, including its last backward pass and optimizer update."""
        self.wait()
        self.seconds["step"] = time.perf_counter() - self._step_started
        self.seconds["wait"] = self.waited() - self._waited_before

    def clear(self) -> None:
        self.seconds.clear()
