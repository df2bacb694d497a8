"""Stop a run early: on a signal, or when the command that started it dies."""

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Self

from qerl_lab.system.exits import INTERRUPTED, SIGNALS, stop_signals


class Interrupted(Exception):
    """The run was asked to stop, and everything needed to resume is saved."""


class Diverged(FloatingPointError):
    """Training cannot continue: loss, gradient norm or a weight is not finite, or the sampler's logits are NaN."""


@dataclass
class Stop:
    """Tells whether the run was asked to stop: by a signal, or because process `parent` died.

    A run then finishes the current step, and leaves held-out questions at once.

    With `parent` None only signals stop the run, so that it can outlive the shell that started it. Until `can_save` is
    set there is nothing to save, and a signal or the death of `parent` ends the process at once.
    """

    signalled: bool = False
    can_save: bool = False
    parent: int | None = None

    @classmethod
    def on_signals(cls, parent: int) -> Self:
        """Create a Stop that reacts to SIGINT, SIGTERM, SIGHUP and the death of process `parent`.

        Unblocks these signals first, in case the starting program had blocked them.
        """
        stop = cls(parent=parent)

        def request_stop(*_: object) -> None:
            """Handle a signal: exit with code 130 if there is nothing to save, else ask the run to stop."""
            if not stop.can_save:
                os._exit(INTERRUPTED)
            stop.signalled = True

        def watch_parent() -> None:
            """Exit with code 130 if `parent` dies before `can_save` is set. Later the steps check `requested`."""
            while not stop.can_save:
                if stop.requested:
                    os._exit(INTERRUPTED)
                time.sleep(1)

        for number in stop_signals():
            signal.signal(number, request_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=watch_parent, daemon=True).start()
        return stop

    def raise_if_requested(self) -> None:
        """Raise Interrupted if the run was asked to stop."""
        if self.requested:
            raise Interrupted

    @property
    def requested(self) -> bool:
        """Tell whether a signal or the parent's death asks the run to stop."""
        return self.signalled or self.parent not in (None, os.getppid())
