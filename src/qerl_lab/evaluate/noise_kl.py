"""Measure KL(noisy policy || clean policy) on the policy's own texts; `aqn.solver` solves sigma for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy


@dataclass(frozen=True)
class CleanTexts:
    """Texts (prompt, completion) to measure noise on, in N batches, with the clean policy's hidden states.

    `clean_N` holds the hidden states of each batch at the compared tokens, [tokens, hidden] (see `kl.hidden_states`).
    """

    policy: Policy
    pairs_N: list[kl.Pairs]
    temperature: float
    clean_N: list[Tensor]

    @property
    def tokens(self) -> int:
        """Number of tokens at which the KL is measured."""
        return sum(len(states) for states in self.clean_N)

    def nats(self, noises: Sequence[Noise]) -> float:
        """Return KL(noisy || clean) in nats, summed over all tokens; 0 without texts.

        Each batch of texts uses one of `noises`, in turn, so each text gets one noise draw only. This is enough,
        because KL varies more between texts than between draws: a few texts dominate it.
        """
        model, total = self.policy.base, 0.0
        for number, (pairs, clean) in enumerate(zip(self.pairs_N, self.clean_N, strict=True)):
            noisy = states(self.policy, noises[number % len(noises)], pairs)
            chunks = (kl.logprobs(model, of, self.temperature) for of in (noisy, clean))
            with self.policy.computing():
                total += sum(kl.per_token(p, q).sum().item() for p, q in zip(*chunks, strict=True))
        return total


def clean_texts(policy: Policy, pairs: kl.Pairs, temperature: float, batch_size: int) -> CleanTexts:
    """Split `pairs` into batches and compute their hidden states without noise. `temperature` divides the logits."""
    pairs_N = [pairs[at : at + batch_size] for at in range(0, len(pairs), batch_size)]
    return CleanTexts(policy, pairs_N, temperature, [states(policy, CLEAN, part) for part in pairs_N])


@torch.no_grad()
def states(policy: Policy, noise: Noise, pairs: kl.Pairs) -> Tensor:
    """Return the policy's hidden states with noise at the compared tokens of all texts: [T, hidden]."""
    with policy.as_sampler(noise.onto_norms(policy.clean_norms)):
        return kl.hidden_states(policy.base, pairs)
