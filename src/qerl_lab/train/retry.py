"""What becomes of a run whose engine fails: it is built again and asked once more, for a step or for an evaluation."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from qerl_lab import rollout, terminal
from qerl_lab.aqn import Noise
from qerl_lab.config.message import first_line
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import EngineFailed, OnDone, Rollout, Sampling, ignore, refuse_incomplete

T = TypeVar("T")


def twice(act: Callable[[], T], mend: Callable[[str], None]) -> T:
    """Return what `act` does; where an engine fails in it, `mend` is told the cause and it is done once more.

    A second failure is raised with both causes. On several ranks `act` must fail on all of them or on none.
    """
    try:
        return act()
    except EngineFailed as error:
        cause = line(error)
    mend(cause)  # not in the handler: the traceback keeps the old engine, and its memory, alive
    try:
        return act()
    except EngineFailed as error:
        raise EngineFailed(f"{line(error)} (of an engine that was built because of this: {cause})") from error


class RunEngine:
    """The engine of a run. It can be built again, and what it gives is complete."""

    def __init__(self, cfg: RunConfig, policy: Policy) -> None:
        self.cfg, self.policy = cfg, policy
        self._engine = rollout.build(cfg, policy)

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = ignore
    ) -> Rollout:
        """Sample. Raises EngineFailed, also where something is missing."""
        found = self._engine.generate(prompt_ids_P, group_size, sampling, on_done)
        refuse_incomplete(found, len(prompt_ids_P), group_size, sampling)
        return found

    def sync(self, noise: Noise) -> None:
        """Take over adapter and noise."""
        self._engine.sync(noise)

    def sleep(self) -> None:
        """Give back memory that only sampling needs, until the next `sync` or `generate`."""
        self._engine.sleep()

    @property
    def linear_backend(self) -> str | None:
        """What computes the products of 4-bit weights; None where there is no choice."""
        return self._engine.linear_backend

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norms' weights that the engine holds."""
        return self._engine.norms()

    def held(self) -> dict[str, int]:
        """Bytes of the device's memory that the engine holds, by what for."""
        return self._engine.held()

    def close(self) -> None:
        """Close the engine. Where that fails nothing more is lost: it is said, and hides no error under way."""
        try:
            self._engine.close()
        except Exception as error:
            terminal.say(f"warning: the engine could not be closed ({type(error).__name__}: {line(error)}).")

    def rebuild(self, cause: str) -> None:
        """Put a new engine, not synced yet, in the place of one that failed, and say so.

        Every rank does, whoever's has failed: some engines of several ranks can only be built together. So no rank
        may wait here for another whose building failed, and the caller has saved before. Raises EngineFailed.
        """
        terminal.say(f"warning: the engine failed ({cause}). Building it again and repeating what was asked.")
        self.close()
        try:
            self._engine = rollout.build(self.cfg, self.policy)
        except Exception as error:  # whatever it is, the first cause tells more
            again = "" if line(error) == cause else f": {type(error).__name__}: {line(error)}"
            raise EngineFailed(f"{cause} (and no engine could be built again{again})") from error


def line(error: Exception) -> str:
    """The first line of a message, to be put into another."""
    return first_line(error).rstrip(".")
