"""Measure the noise over the whole vocabulary, on the trainer's model."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout


@dataclass(frozen=True)
class Probed:
    """Results of the probe, in nats.

    Attributes:
        noise_kl: mean KL per token from the policy with the engine's norms to the policy without noise.
        kernel_gap_T: abs(sampler log-prob - log-prob of the policy with the engine's norms) of each token, float64.
            Both sides use the same weights and noise, so a gap comes from the engines' arithmetic or from an error.
    """

    noise_kl: kl.Estimate
    kernel_gap_T: Tensor


def probe(policy: Policy, norms: dict[str, Tensor], rollout: Rollout, completions: int, temperature: float) -> Probed:
    """Compare the sampler, the policy with the sampler's norms, and the policy without noise.

    Args:
        completions: number of the rollout's completions to compare, spread over its prompts.
        norms: the engine's norm weights by full layer name; on any device.
    """
    groups = zip(rollout.prompt_ids_P, rollout.completion_ids_P_G, rollout.logprobs_P_G, strict=True)
    rows = [(prompt, *row) for prompt, *group in groups for row in zip(*group, strict=True)]
    rows = rows[:: max(1, len(rows) // completions)][:completions]
    pairs = [(prompt, completion) for prompt, completion, _ in rows]
    tokens_T = torch.tensor([token for _, completion in pairs for token in completion], device=policy.device)
    sampler_T = torch.tensor([logprob for *_, logprobs in rows for logprob in logprobs], dtype=torch.float64)
    noisy = {name: weight.to(policy.norms[name]) for name, weight in norms.items()}
    model, kl_T, noisy_T = policy.model.get_base_model(), list[Tensor](), list[Tensor]()
    with policy.as_sampler(policy.clean_norms):
        clean_states = kl.hidden_states(model, pairs)
        with policy.norms_as(noisy):
            noisy_states = kl.hidden_states(model, pairs)
        chunks = (kl.logprobs(model, states, temperature) for states in (noisy_states, clean_states))
        for p, q, tokens in zip(*chunks, tokens_T.split(kl.CHUNK), strict=True):
            kl_T.append(kl.per_token(p, q).cpu())
            noisy_T.append(p.gather(-1, tokens[:, None])[:, 0].double().cpu())
    estimate = kl.mean(torch.cat(kl_T), [len(completion) for _, completion in pairs])
    return Probed(estimate, (sampler_T - torch.cat(noisy_T)).abs())
