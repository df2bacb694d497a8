"""Importance weights for sampling from another policy than the trainer's, and metrics of the mismatch.

Axes: B completions of the batch, T tokens of a completion, N micro-batches of all ranks.

The sampler draws a token with its own probability; the trainer's differs by noise and kernels. The ratio trainer /
sampler, truncated at `rollout.importance_clip_max`, weighs the token's loss (truncated importance sampling). The
weights equal TRL's (`GRPOTrainer._generate_and_score_completions`); tests/golden/test_loss.py compares them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class ImportanceWeights(NamedTuple):
    """Importance weights of the loss: one per token, both fields [B, T], or one per completion, both [B, 1].

    Attributes:
        value: the weight, 0 or more, in the dtype of the log-probs.
        is_cut: whether the ratio exceeded its upper bound, so that `value` is that bound or 0.
    """

    value: Tensor
    is_cut: Tensor


def importance_weights(
    correction: str, clip_max: float, trainer_B_T: Tensor, sampler_B_T: Tensor, mask_B_T: Tensor
) -> ImportanceWeights:
    """Compute the importance weights: the trainer's probability of what was sampled, divided by the sampler's.

    There is one weight per token [B, T], or one per completion [B, 1] for "sequence_*", "off" and "in_ratio".

    A ratio above `clip_max` becomes `clip_max` ("*_truncate") or 0 ("*_mask"). "off" and "in_ratio" give weights of 1.

    Args:
        correction: one of `schema.CORRECTIONS`.
        trainer_B_T, sampler_B_T: log-probs of the sampled tokens in nats, without gradients. NaN in either gives the
            token a ratio of 1, as in TRL.
        mask_B_T: 1 for completion tokens, 0 for padding, which gets a ratio of 1.
    """
    log_ratio = ((trainer_B_T - sampler_B_T) * mask_B_T).nan_to_num(nan=0.0)
    if correction in ("off", "in_ratio"):  # in_ratio: the loss itself divides by the sampler
        ones = torch.ones_like(log_ratio[:, :1])
        return ImportanceWeights(ones, torch.zeros_like(ones, dtype=torch.bool))
    if correction.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    is_cut = ratio > clip_max
    return ImportanceWeights(ratio.masked_fill(is_cut, clip_max if correction.endswith("truncate") else 0.0), is_cut)


def mismatch_sums(weights: ImportanceWeights, trainer_B_T: Tensor, sampler_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Return the sums over the completion tokens of a micro-batch that `mismatch_metrics` takes: float64 [10].

    Entries 0 to 8 are sums, in the order of that function; the last is the largest absolute log-ratio.

    Args:
        weights: result of `importance_weights`. Weights per completion are counted once per completion.
        trainer_B_T, sampler_B_T: log-probs of the sampled tokens in nats.
        mask_B_T: 1 for completion tokens, 0 for padding.
    """
    mask = mask_B_T.double()
    log_ratio = torch.where(mask_B_T.bool(), trainer_B_T.double() - sampler_B_T.double(), 0.0)
    gap, ratio = log_ratio.abs(), log_ratio.exp() * mask
    counted = mask if weights.value.shape == mask.shape else torch.ones_like(weights.value, dtype=torch.float64)
    k1, k3 = -log_ratio, log_ratio.expm1() - log_ratio
    summed = (mask, gap, k1, k3, ratio, ratio.square(), weights.is_cut * mask, weights.value * counted, counted)
    return torch.stack([*(term.sum() for term in summed), gap.max()])


def mismatch_metrics(sums_N: list[list[float]]) -> dict[str, float]:
    """Compute the metrics `sampler/*` of the mismatch of sampler and trainer from sums over micro-batches.

    `sums_N` has the result of `mismatch_sums`, as a list, for each micro-batch of all ranks. A NaN log-prob makes the
    averages NaN.
    """
    *columns, largest_gaps = zip(*sums_N, strict=True)
    tokens, gap, k1, k3, ratio, ratio_squared, cut, weight, counted = map(math.fsum, columns)
    return {
        "sampler/logprob_gap_mean": gap / tokens,
        "sampler/logprob_gap_max": max(largest_gaps),
        "sampler/importance_ratio_mean": weight / counted,
        "sampler/kl_k1_nats": k1 / tokens,
        "sampler/kl_k3_nats": k3 / tokens,
        "sampler/effective_sample_size": ratio**2 / (tokens * ratio_squared),
        "sampler/importance_clipped_fraction": cut / tokens,
    }
