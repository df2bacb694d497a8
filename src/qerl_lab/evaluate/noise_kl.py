"""KL(policy with noise || policy without) over texts of its own: what `aqn.found` solves sigma for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy


@dataclass(frozen=True)
class Texts:
    """Texts (prompt, completion), on which noise is measured at a temperature, and the policy's states without noise.

    `clean_N` are `kl.hidden_states` of `batch_size` texts at a time, [tokens, hidden] each.
    """

    policy: Policy
    pairs_N: list[kl.Pairs]
    temperature: float
    clean_N: list[Tensor]

    @property
    def tokens(self) -> int:
        return sum(len(states) for states in self.clean_N)

    def nats(self, noises: Sequence[Noise]) -> float:
        """KL summed over the tokens; 0 where there is no text. Each batch has one of the noises, in turn.

        Texts differ more than draws do, a few of them in most of the KL: so no text is spent on two draws.
        """
        model, total = self.policy.model.get_base_model(), 0.0
        for number, (pairs, clean) in enumerate(zip(self.pairs_N, self.clean_N, strict=True)):
            noisy = states(self.policy, noises[number % len(noises)], pairs)
            chunks = (kl.logprobs(model, of, self.temperature) for of in (noisy, clean))
            total += sum(kl.per_token(p, q).sum().item() for p, q in zip(*chunks, strict=True))
        return total


def texts(policy: Policy, pairs: kl.Pairs, temperature: float, batch_size: int) -> Texts:
    """Take the states without noise. The policy is left as it was."""
    pairs_N = [pairs[at : at + batch_size] for at in range(0, len(pairs), batch_size)]
    return Texts(policy, pairs_N, temperature, [states(policy, CLEAN, part) for part in pairs_N])


@torch.no_grad()
def states(policy: Policy, noise: Noise, pairs: kl.Pairs) -> Tensor:
    """`kl.hidden_states` of the policy with noise."""
    with policy.as_sampler(noise.onto_norms(policy.clean_norms)):
        return kl.hidden_states(policy.model.get_base_model(), pairs)
