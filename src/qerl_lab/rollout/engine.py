"""The contract of an engine, and what goes in and comes out. tests/unit/rollout/test_contract.py holds it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qerl_lab.aqn import Noise


class EngineFailed(RuntimeError):
    """An engine died, took too long, or gave less than was asked. The message is the cause, for the user."""


@dataclass(frozen=True)
class Sampling:
    """How to sample. `seed` decides the draw together with the policy, so that a resumed run repeats it."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Rollout:
    """Completions of P prompts, G each; plain data.

    Attributes:
        completion_ids_P_G: token ids; an end token is part of its completion.
        logprobs_P_G: the sampler's own, of the sampled tokens, in nats, at its temperature and before any nucleus cut;
            NaN where its logits are. With top_p < 1 empty, of an engine that sees them after the cut only.
        finish_reasons_P_G: "stop" at an end token, "length" at `Sampling.max_tokens` without one.
        entropy: -sum p log p over the vocabulary in nats, mean over all completion tokens, p as for `logprobs_P_G`.
            None from an engine that never sees the whole vocabulary.
        seconds: wall time until the device is done.
    """

    prompt_ids_P: list[list[int]]
    completion_ids_P_G: list[list[list[int]]]
    logprobs_P_G: list[list[list[float]]]
    finish_reasons_P_G: list[list[str]]
    entropy: float | None
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(ids) for group in self.completion_ids_P_G for ids in group)


OnDone = Callable[[int], None]


def ignore(count: int) -> None:
    """Nobody watches."""


class Engine(Protocol):
    """A sampler of the policy that it was built on, as that policy was at the last `sync` or is now."""

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = ignore
    ) -> Rollout:
        """Sample `group_size` completions of each prompt; `on_done` hears how many more are there, part by part."""

    def sync(self, noise: Noise) -> None:
        """Take over the policy's adapter, and its clean norms plus `noise` (`aqn.CLEAN` for none)."""

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norms' weights that the engine holds, by the full name of their layer."""

    def close(self) -> None:
        """Give back what the engine holds; it is not used again."""
