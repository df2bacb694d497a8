"""Ends before the last step: a signal, the death of the starting command, or numbers that a run cannot go on with."""

import math
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from qerl_lab.config.schema import OptimConfig
from qerl_lab.exits import INTERRUPTED, SIGNALS, heard


class Interrupted(Exception):
    """The run was asked to stop, and what is worth saving is saved."""


class Diverged(FloatingPointError):
    """Training cannot go on: a number that it rests on is NaN or infinite."""


def refuse_infinite(values: Mapping[str, float], step: int, optim: OptimConfig) -> None:
    """Raise Diverged where one of `values`, by what they are called, is NaN or infinite."""
    for name, value in values.items():
        if not math.isfinite(value):
            raise Diverged(
                f"{name} is {'NaN' if math.isnan(value) else 'infinite'} at step {step}. Type a lower "
                f"optim.learning_rate (it is {optim.learning_rate:g}) or optim.max_grad_norm "
                f"(it is {optim.max_grad_norm:g})."
            )


@dataclass
class Stop:
    """Whether the run was asked to stop after the step under way.

    `parent` is the process that it must not outlive; None for a run that is a call in somebody's program, as in a test:
    a shell that leaves that program in the background ends nothing.

    Until `can_save` there is nothing to save, and a signal ends the process at once.
    """

    signalled: bool = False
    can_save: bool = False
    parent: int | None = None

    @classmethod
    def on_signals(cls, parent: int) -> Self:
        """Hear SIGINT, SIGTERM and SIGHUP, also those that came before: the parent holds them back until here."""
        stop = cls(parent=parent)
        for number in heard():
            signal.signal(number, lambda *_: stop._hear())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return stop

    def _hear(self) -> None:
        if not self.can_save:
            os._exit(INTERRUPTED)
        self.signalled = True

    def check(self) -> None:
        """Raise Interrupted if the run was asked to stop."""
        if self.requested:
            raise Interrupted

    @property
    def requested(self) -> bool:
        return self.signalled or self.parent not in (None, os.getppid())
