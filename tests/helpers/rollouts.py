"""Recompute rollouts in float64: log-probs of each completion under a policy with given norms."""

import copy

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from packed_layers import dense_twin
from qerl_lab import tasks
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout


def rows(rollout: Rollout) -> list[tuple[list[int], list[int], list[float]]]:
    """Return (prompt, completion, sampler log-probs) of every completion."""
    groups = zip(rollout.prompt_ids_P, rollout.completions_P_G, strict=True)
    return [(prompt, completion.ids, completion.logprobs) for prompt, group in groups for completion in group]


def ids_of(rollout: Rollout) -> list[list[list[int]]]:
    """Return the token ids of every completion, by prompt and completion."""
    return [[completion.ids for completion in group] for group in rollout.completions_P_G]


def unequal_prompts(policy: Policy, cfg: RunConfig) -> list[list[int]]:
    """Return five prompts of unequal lengths from the run's task, the first cut to one token."""
    task = tasks.load(cfg.task)
    by_length = {len(ids): ids for ids in (policy.chat.prompt_ids(task.messages(question)) for question in task.train)}
    lengths = sorted(by_length)
    return [by_length[lengths[0]][:1], *(by_length[length] for length in (*lengths[:2], *lengths[-2:]))]


def distributions(
    policy: Policy, rollout: Rollout, norms: dict[str, Tensor] | None = None, temperature: float = 1.0
) -> list[Tensor]:
    """Return log-probs [tokens, vocabulary] in float64 of each completion, optionally with other norms.

    Computes all sequences at once, without cache and mask, with dense weights: causal attention does not see the
    padding to the right of a text. (transformers' norms use float32.)
    """
    model = copy.deepcopy(policy.model).eval()
    packed = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()
              if isinstance(child, PackedLinear)]  # fmt: skip
    for parent, name, child in packed:
        setattr(parent, name, dense_twin(child))
    model.double()
    base = model if policy.trains_all else model.get_base_model()
    for name, weight in (norms or {}).items():
        base.get_submodule(name).weight.data = weight.to(policy.device, torch.float64)
    texts = [(prompt, completion) for prompt, completion, _ in rows(rollout)]
    ids = pad_sequence([torch.tensor(prompt + completion) for prompt, completion in texts], batch_first=True)
    with torch.no_grad():
        logits = model(input_ids=ids.to(policy.device)).logits
    assert logits.dtype == torch.float64
    logps = (logits / temperature).log_softmax(-1).cpu()
    return [
        own[len(prompt) - 1 : len(prompt) + len(completion) - 1]
        for own, (prompt, completion) in zip(logps, texts, strict=True)
    ]


def of_tokens(distributions: list[Tensor], rollout: Rollout) -> Tensor:
    """Return the log-probs of the sampled tokens, concatenated over completions: [tokens]."""
    pairs = zip(distributions, rows(rollout), strict=True)
    return torch.cat([logps[torch.arange(len(ids)), ids] for logps, (_, ids, _) in pairs])


def gap(rollout: Rollout, distributions: list[Tensor]) -> float:
    """Return the largest difference between the sampler's log-probs and those of `distributions`, in nats."""
    told = torch.tensor([logprob for _, _, logprobs in rows(rollout) for logprob in logprobs], dtype=torch.float64)
    return (told - of_tokens(distributions, rollout)).abs().max().item()
