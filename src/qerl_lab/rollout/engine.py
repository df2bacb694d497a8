"""The contract of an engine, and what goes in and comes out. tests/unit/rollout/test_contract.py holds it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qerl_lab.aqn import Noise


@dataclass(frozen=True)
class Sampling:
    """How to sample. `seed` decides the draw together with the policy, so that a resumed run repeats it.

    Of prompts that several engines share under one seed, `first` is the number of the first that this one is asked.
    Temperature 0 is greedy: the most probable token each time, in groups of one. Log-probs and entropy are then those
    at temperature 1.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    first: int = 0

    def seeds(self, prompts: int) -> list[int]:
        """A seed for each prompt, by its number: whoever is asked it draws the same."""
        generator = random.Random(self.seed)
        return [generator.getrandbits(62) for _ in range(self.first + prompts)][self.first :]


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


class EngineFailed(RuntimeError):
    """The engine died, ran out of time, or gave less than was asked; the text is the cause, for the user, in a line.

    A run builds the engine again and asks once more. So what would only happen again is no such failure: a bug, a
    ConfigError, NaN.
    """


def refuse_incomplete(rollout: Rollout, prompts: int, group_size: int, sampling: Sampling) -> None:
    """Raise EngineFailed unless there are `group_size` completions of each prompt, with a log-prob a token."""
    parts: dict[str, Sequence[Sequence[object]]] = {
        "completions": rollout.completion_ids_P_G,
        "log-probs": rollout.logprobs_P_G,
        "finish reasons": rollout.finish_reasons_P_G,
    }
    for what, groups in parts.items():
        if len(groups) != prompts:
            raise EngineFailed(f"the engine gave {what} for {len(groups)} of {prompts} prompts")
        if wrong := [len(group) for group in groups if len(group) != group_size]:
            raise EngineFailed(f"the engine gave {wrong[0]} {what} for a prompt, and {group_size} were asked")
    for ids_G, logprobs_G in zip(rollout.completion_ids_P_G, rollout.logprobs_P_G, strict=True):
        for ids, logprobs in zip(ids_G, logprobs_G, strict=True):
            untold = sampling.top_p < 1 and not logprobs
            if not ids or (len(ids) != len(logprobs) and not untold):
                raise EngineFailed(f"the engine gave {len(logprobs)} log-probs for a completion of {len(ids)} tokens")


# Among what an engine holds: what it has given back while it sleeps.
ASLEEP = "asleep"

OnDone = Callable[[int], None]


def ignore(count: int) -> None:
    """Nobody watches."""


class Engine(Protocol):
    """A sampler of the policy that it was built on, as that policy was at the last `sync` or is now."""

    @property
    def linear_backend(self) -> str | None:
        """What computes the products of 4-bit weights, in words of `rollout.vllm`; None where there is no choice."""

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = ignore
    ) -> Rollout:
        """Sample `group_size` completions of each prompt; `on_done` hears how many more are there, part by part.

        Raises EngineFailed, and what `on_done` raises.
        """

    def sync(self, noise: Noise) -> None:
        """Take over the policy's adapter, and its clean norms plus `noise` (`aqn.CLEAN` for none).

        Raises EngineFailed.
        """

    def sleep(self) -> None:
        """Give back memory that only sampling needs, where it is configured to; `sync` and `generate` take it again.

        It may be said twice. Raises EngineFailed.
        """

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norms' weights that the engine holds, by the full name of their layer."""

    def held(self) -> dict[str, int]:
        """Bytes of the device's memory that are the engine's alone, by what for.

        Under `ASLEEP` stands what it does not hold now, and torch counts as reserved all the same.
        """

    def close(self) -> None:
        """Give back what the engine holds; it is not used again."""
