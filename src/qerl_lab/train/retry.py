"""Rebuild a failed engine and repeat the request once, for a step or an evaluation."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from qerl_lab import rollout
from qerl_lab.aqn import Noise
from qerl_lab.config.message import first_line
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import EngineFailed, OnDone, Rollout, Sampling, do_nothing, refuse_incomplete
from qerl_lab.system import terminal

T = TypeVar("T")


def retry_once(act: Callable[[], T], recover: Callable[[str], None]) -> T:
    """Return the result of `act`. If an engine fails, call `recover` with the cause and retry once.

    A second failure raises EngineFailed with both causes. With several ranks `act` must fail on all or none.
    """
    try:
        return act()
    except EngineFailed as error:
        cause = cause_text(error)
    recover(cause)  # outside the handler: the traceback would keep the old engine and its memory alive
    try:
        return act()
    except EngineFailed as error:
        raise EngineFailed(f"{cause_text(error)} (of an engine that was built because of this: {cause})") from error


class RunEngine:
    """The engine of a run. It can be rebuilt, and it refuses incomplete rollouts."""

    def __init__(self, cfg: RunConfig, policy: Policy) -> None:
        self.cfg, self.policy = cfg, policy
        self._engine = rollout.build(cfg, policy)

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample completions. Raises EngineFailed, also for an incomplete rollout."""
        found = self._engine.generate(prompt_ids_P, group_size, sampling, on_done)
        refuse_incomplete(found, len(prompt_ids_P), group_size, sampling)
        return found

    def sync(self, noise: Noise) -> None:
        """Load the current adapter and noise into the engine."""
        self._engine.sync(noise)

    def sleep(self) -> None:
        """Free memory that only sampling needs, until the next `sync` or `generate`."""
        self._engine.sleep()

    @property
    def linear_backend(self) -> str | None:
        """Name of the kernel that multiplies 4-bit weights; None if the engine has no choice."""
        return self._engine.linear_backend

    def norms(self) -> dict[str, Tensor]:
        """Return the noisy norm weights that the engine holds, by full layer name."""
        return self._engine.norms()

    def held(self) -> dict[str, int]:
        """Return the bytes of device memory that the engine holds, by purpose."""
        return self._engine.held()

    def close(self) -> None:
        """Close the engine. Print a failure to close, so that it does not hide an error that is being raised."""
        try:
            self._engine.close()
        except Exception as error:
            terminal.say(f"warning: the engine could not be closed ({type(error).__name__}: {cause_text(error)}).")

    def rebuild(self, cause: str) -> None:
        """Replace the failed engine by a new one, not synced yet, and print a warning.

        All ranks rebuild, because some multi-rank engines can only be built together. A rank must not wait here for one
        that failed to build, and the caller must save first. Raises EngineFailed.
        """
        terminal.say(f"warning: the engine failed ({cause}). Building it again and repeating what was asked.")
        self.close()
        try:
            self._engine = rollout.build(self.cfg, self.policy)
        except Exception as error:  # of any type; the first cause is more informative
            again = "" if cause_text(error) == cause else f": {type(error).__name__}: {cause_text(error)}"
            raise EngineFailed(f"{cause} (and no engine could be built again{again})") from error


def cause_text(error: Exception) -> str:
    """Return the first line of an error message without its full stop, to embed it in another message."""
    return first_line(error).rstrip(".")
