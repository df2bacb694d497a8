"""The correction for sampling by another policy than the trainer's: weights of the loss, and how far the two are apart.

A token is drawn with the probability that the sampler gave it, and trained on with the trainer's. The ratio of the two,
cut at `rollout.importance_clip_max`, weighs its loss (truncated importance sampling). The weights are TRL's
(`GRPOTrainer._generate_and_score_completions`), to which tests/unit/train/test_one_forward.py holds them.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Weights(NamedTuple):
    """The weight of each token in the loss. Both fields are [B, T], or [B, 1] for one number a completion.

    Attributes:
        value: 0 or more, in the dtype of the log-probs.
        is_cut: whether the ratio was above the bound, so that it was lowered or made zero.
    """

    value: Tensor
    is_cut: Tensor


def weights(correction: str, clip_max: float, trainer_B_T: Tensor, sampler_B_T: Tensor, mask_B_T: Tensor) -> Weights:
    """The trainer's probability over the sampler's, corrected as one of `schema.CORRECTIONS` says.

    Args:
        trainer_B_T: log-probs in nats, without gradients; NaN on either side is a ratio of 1, as in TRL.
        mask_B_T: completion tokens, over which the sequence corrections multiply the ratios.
    """
    log_ratio = ((trainer_B_T - sampler_B_T) * mask_B_T).nan_to_num(nan=0.0)
    if correction in ("off", "in_ratio"):  # of the latter the loss itself has the ratio to the sampler
        ones = torch.ones_like(log_ratio[:, :1])
        return Weights(ones, torch.zeros_like(ones, dtype=torch.bool))
    if correction.startswith("sequence"):
        log_ratio = log_ratio.sum(-1, keepdim=True)
    ratio = log_ratio.exp()
    is_cut = ratio > clip_max
    return Weights(ratio.masked_fill(is_cut, clip_max if correction.endswith("truncate") else 0.0), is_cut)


def sums(weights: Weights, trainer_B_T: Tensor, sampler_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """What `mismatch` is made of: sums over the completion tokens in float64, and last the largest gap, [10]."""
    mask = mask_B_T.double()
    log_ratio = torch.where(mask_B_T.bool(), trainer_B_T.double() - sampler_B_T.double(), 0.0)
    gap, ratio = log_ratio.abs(), log_ratio.exp() * mask
    counted = mask if weights.value.shape == mask.shape else torch.ones_like(weights.value, dtype=torch.float64)
    added = (
        mask, gap, -log_ratio, log_ratio.expm1() - log_ratio, ratio, ratio.square(), weights.is_cut * mask,
        weights.value * counted, counted,
    )  # fmt: skip
    return torch.stack([*(each.sum() for each in added), gap.max()])


def mismatch(sums_N: list[list[float]]) -> dict[str, float]:
    """Metrics of the `sums` of all micro-batches of all ranks. NaN where a log-prob was."""
    *added, largest = zip(*sums_N, strict=True)
    tokens, gap, k1, k3, ratio, ratio_squared, cut, weight, counted = map(math.fsum, added)
    return {
        "sampler/logprob_gap_mean": gap / tokens,
        "sampler/logprob_gap_max": max(largest),
        "sampler/importance_ratio_mean": weight / counted,
        "sampler/kl_k1_nats": k1 / tokens,
        "sampler/kl_k3_nats": k3 / tokens,
        "sampler/effective_sample_size": ratio**2 / (tokens * ratio_squared),
        "sampler/importance_clipped_fraction": cut / tokens,
    }
