"""Measurements of the noise that need the whole vocabulary, made on the trainer's own model."""

from torch import Tensor

from qerl_lab import aqn
from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout


def noise_kl(
    policy: Policy, norms: dict[str, Tensor], rollout: Rollout, completions: int, temperature: float
) -> kl.Estimate:
    """KL(policy with `norms` || policy without noise), in nats per token.

    Args:
        completions: how many of the rollout's are compared, spread over its prompts.
        norms: the weights that an engine holds, by the full name of their layer; any device and dtype.
    """
    groups = zip(rollout.prompt_ids_P, rollout.completion_ids_P_G, strict=True)
    pairs = [(prompt, completion) for prompt, group in groups for completion in group]
    pairs = pairs[:: max(1, len(pairs) // completions)][:completions]
    noisy = {name: weight.to(policy.norms[name]) for name, weight in norms.items()}
    model = policy.model.get_base_model()
    with policy.as_sampler(aqn.CLEAN.onto_norms(policy.clean_norms, policy.norms)):
        clean_states = kl.hidden_states(model, pairs)
        with policy.norms_as(noisy):
            noisy_states = kl.hidden_states(model, pairs)
        p, q = (kl.logprobs(model, states, temperature) for states in (noisy_states, clean_states))
        return kl.measure(p, q, [len(completion) for _, completion in pairs])
