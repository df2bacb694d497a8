"""Engines turn prompts into completions. They are interchangeable: the contract is `Engine`."""

from dataclasses import dataclass
from typing import Protocol

from qerl_lab.aqn import Noise
from qerl_lab.policy import Policy


@dataclass(frozen=True)
class Sampling:
    """How to sample. `seed` decides the draw together with the policy, so that a resumed run repeats it."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Rollout:
    """Completions of P prompts, G each. `logprobs` are the sampler's own, of the sampled tokens, at its temperature
    and before any nucleus cut; `entropy` is the mean over all completion tokens of -sum p log p, in nats."""

    prompt_ids_P: list[list[int]]
    completion_ids_P_G: list[list[list[int]]]
    logprobs_P_G: list[list[list[float]]]
    finish_reasons_P_G: list[
        list[str]
    ]  # "stop" at an end token (which is part of the completion), "length" at the limit
    entropy: float
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(len(ids) for group in self.completion_ids_P_G for ids in group)


class Engine(Protocol):
    def sync(self, policy: Policy, noise: Noise | None) -> None:
        """Take over the policy's adapter and its clean norms plus `noise`."""

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout: ...

    def noise_std(self) -> float:
        """Standard deviation of (norm weights held - clean weights) over all noisy norms, read from the engine."""

    def noise_kl(self, rollout: Rollout, completions: int, temperature: float) -> float:
        """KL(noisy || clean sampler) per token in nats, over the vocabulary, on the first completions of a rollout."""

    def close(self) -> None: ...
