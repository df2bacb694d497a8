"""The interface of a rollout engine, its inputs and outputs. tests/unit/rollout/test_contract.py tests every engine.

Suffixes name the axes of ragged lists: `x_P` is a list by prompt, `x_P_G` by prompt and completion of its group.
"""

import math
import random
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from qerl_lab.aqn import Noise


@dataclass(frozen=True)
class Sampling:
    """Sampling settings. Draws depend only on `seed`, prompts and policy, so a resumed run repeats them.

    Several engines may split one list of prompts under one seed; `first` is then the index of this engine's first
    prompt in that list. Temperature 0 is greedy and needs a group size of 1. Log-probs and entropy are then
    taken at temperature 1.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    first: int = 0

    def seeds(self, prompts: int) -> list[int]:
        """Return a seed for each of `prompts` prompts from `first` on; it depends on `seed` and the prompt's index."""
        generator = random.Random(self.seed)
        return [generator.getrandbits(62) for _ in range(self.first + prompts)][self.first :]


class Completion(NamedTuple):
    """One sampled completion.

    Attributes:
        ids: token ids, including the end token.
        logprobs: the sampler's log-probs of `ids` in nats, at the sampling temperature and before any nucleus (top_p)
            cut; NaN where the logits are NaN. Empty with top_p < 1 if the engine sees only the log-probs after the cut.
        finish_reason: "stop" at an end token, "length" at `Sampling.max_tokens` without one.
        entropy: -sum p log p over the vocabulary in nats, summed over all tokens, with the probabilities of `logprobs`.
            None if the engine never sees the probabilities of the whole vocabulary.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    entropy: float | None = None


@dataclass(frozen=True)
class Rollout:
    """G completions of each of P prompts, as plain data.

    `seconds` is the wall time of sampling, until the device has finished.
    """

    prompt_ids_P: list[list[int]]
    completions_P_G: list[list[Completion]]
    seconds: float

    @property
    def completions(self) -> list[Completion]:
        """Return all completions, prompt by prompt."""
        return [completion for group in self.completions_P_G for completion in group]

    @property
    def tokens(self) -> int:
        """Return the number of completion tokens."""
        return sum(len(completion.ids) for completion in self.completions)

    @property
    def entropy(self) -> float | None:
        """Return the entropy in nats, averaged over all completion tokens; None if no completion has an entropy."""
        entropies = [completion.entropy for completion in self.completions if completion.entropy is not None]
        return sum(entropies) / self.tokens if entropies else None

    @property
    def has_nan(self) -> bool:
        """Tell whether a log-prob is NaN, as it is where the sampler's logits are NaN."""
        return any(math.isnan(logprob) for completion in self.completions for logprob in completion.logprobs)


class EngineFailed(RuntimeError):
    """The engine died, timed out, or returned less than was asked. The run then saves its state and can be resumed."""


def refuse_incomplete(rollout: Rollout, prompts: int, group_size: int, sampling: Sampling) -> None:
    """Raise EngineFailed unless each of the `prompts` prompts has `group_size` nonempty completions.

    Each completion needs one log-prob per token; with top_p < 1 it may lack all log-probs.
    """
    sizes = [len(group) for group in rollout.completions_P_G]
    if sizes != prompts * [group_size]:
        raise EngineFailed(
            f"the engine gave {sum(sizes)} completions for {len(sizes)} prompts; asked: {group_size} for each of "
            f"{prompts}"
        )
    for ids, logprobs, *_ in rollout.completions:
        may_lack_logprobs = sampling.top_p < 1 and not logprobs
        if not ids or (len(ids) != len(logprobs) and not may_lack_logprobs):
            raise EngineFailed(f"the engine gave {len(logprobs)} log-probs for a completion of {len(ids)} tokens")


OnDone = Callable[[int], None]


def do_nothing(count: int) -> None:
    """Do nothing: the default `on_done` callback of `Engine.generate`."""


class Engine(Protocol):
    """Samples completions from the policy that it was built on.

    Uses the policy's weights of the last `sync`, or the current ones if the engine shares the policy's memory.
    The default methods suit an engine that holds no memory on this machine.

    Attributes:
        linear_backend: name of the kernel for products with packed weights, a choice of rollout.vllm.linear_backend;
            None if the engine does not choose one.
    """

    linear_backend: str | None = None

    @abstractmethod
    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample `group_size` completions of each prompt.

        Calls `on_done` at least once a token, or about every second while a server samples, with the number of
        completions that finished since its last call, often 0. An exception from `on_done` ends the sampling and is
        passed on: so a caller can stop long before a completion is finished. Raises EngineFailed if sampling fails.
        """

    @abstractmethod
    def sync(self, noise: Noise) -> None:
        """Give the engine the policy's current trained weights, and the policy's clean norms plus `noise`.

        Raises EngineFailed if the engine cannot take them.
        """

    @abstractmethod
    def norms(self) -> dict[str, Tensor]:
        """Read back the noisy norm weights that the engine holds, by full layer name."""

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of device memory that only the engine uses, by a label for messages; {} if there is none."""
        return {}

    def abort(self) -> None:
        """Stop a `generate` that runs in another thread, if the engine can; the default does nothing.

        A stopped `generate` raises EngineFailed, and so does every later one. Afterwards only `close` may be called.
        """
        return

    @abstractmethod
    def close(self) -> None:
        """Release everything; the engine cannot be used again."""
