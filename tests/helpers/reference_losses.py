"""The papers' objectives, written from their formulas: float64, one completion at a time, without padding.

torch computes the gradients of these formulas. Sources: GRPO (arXiv 2402.03300, Eq. 3 and 4), QeRL (2510.11696, Eq. 3
and 4), DAPO (2503.14476, Eq. 8 to 12), Dr. GRPO (2503.20783), GSPO (2507.18071, Eq. 5 and 7), CISPO (2506.13585, Eq. 4
and 5), the KL times the ratio (2512.02556), adaptive entropy (2505.22312).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from qerl_lab.config.schema import RunConfig

END = 2  # <|im_end|> of the pocket
NONE = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Sample:
    """One completion: token ids, their log-probs under each policy, and the advantage."""

    prompt: list[int]
    tokens: list[int]
    old: Tensor  # the trainer's policy at the time of the rollout
    sampler: Tensor  # as the engine gave them
    reference: Tensor  # the base
    advantage: float = 0.0
    new: Tensor = field(default_factory=lambda: NONE)  # the trainer's policy in the current update
    entropy: Tensor = field(default_factory=lambda: NONE)  # of its distribution at each token

    @property
    def finished(self) -> bool:
        return self.tokens[-1:] == [END]


def advantages(rewards_P_G: np.ndarray, normalize_std: bool) -> np.ndarray:
    """Compute Eq. 4, with the unbiased standard deviation plus 1e-4."""
    centred = rewards_P_G - rewards_P_G.mean(1, keepdims=True)
    return centred / (rewards_P_G.std(1, ddof=1, keepdims=True) + 1e-4) if normalize_std else centred


def ratio(sample: Sample, cfg: RunConfig) -> Tensor:
    """Return pi / pi_old of each token; for GSPO the completion's ratio at each token."""
    is_in = cfg.rollout.importance_correction == "in_ratio"
    log_ratio = sample.new - (sample.sampler if is_in else sample.old)
    if cfg.algorithm.name == "gspo" and len(log_ratio):
        log_ratio = log_ratio.mean().expand(len(log_ratio))
    return log_ratio.exp()


def importance(sample: Sample, cfg: RunConfig) -> Tensor:
    """Return the importance weight of each token, because the sampler drew it and not the trainer's policy."""
    kind, most = cfg.rollout.importance_correction, cfg.rollout.importance_clip_max
    log_ratio = sample.old - sample.sampler
    if kind in ("off", "in_ratio"):
        return torch.ones_like(log_ratio)
    found = (log_ratio.sum().expand(len(log_ratio)) if kind.startswith("sequence") else log_ratio).exp()
    return found.clamp(max=most) if kind.endswith("truncate") else torch.where(found > most, 0.0, found)


def kl(sample: Sample, cfg: RunConfig) -> Tensor:
    """Estimate KL(new || reference) of each token."""
    to_reference = sample.reference - sample.new
    k3 = to_reference.exp() - to_reference - 1
    return k3 if cfg.algorithm.kl_estimator == "k3" else ratio(sample, cfg) * k3


def token_losses(sample: Sample, cfg: RunConfig) -> Tensor:
    algorithm, r, advantage = cfg.algorithm, ratio(sample, cfg), sample.advantage
    match algorithm.name:
        case "cispo":
            gain = r.detach().clamp(max=1 + algorithm.epsilon_high) * advantage * sample.new
        case "grpo" | "dapo" | "dr_grpo" | "gspo":
            clipped = r.clamp(1 - algorithm.epsilon_low, 1 + algorithm.epsilon_high)
            gain = torch.minimum(r * advantage, clipped * advantage)
        case name:
            raise NotImplementedError(f"write the paper's formula of {name} into tests/helpers/reference_losses.py")
    return -importance(sample, cfg) * gain + algorithm.beta * kl(sample, cfg)


def counts(sample: Sample, cfg: RunConfig) -> bool:
    return sample.finished or not cfg.algorithm.mask_truncated


def tokens_of(samples: list[Sample], cfg: RunConfig) -> int:
    return sum(len(sample.tokens) for sample in samples if counts(sample, cfg))


def policy_loss(update: list[Sample], rollout: list[Sample], cfg: RunConfig) -> Tensor:
    """Return the loss of an update, which is a share of a rollout.

    GRPO, GSPO: mean over the tokens of a completion, then over completions, with 0 for a masked one. Dr. GRPO: sum over
    tokens divided by the longest completion allowed. DAPO, CISPO: mean over the rollout's tokens.
    """
    parts = [token_losses(sample, cfg) for sample in update if counts(sample, cfg) and sample.tokens]
    match cfg.algorithm.name:
        case "grpo" | "gspo":
            return sum((part.mean() for part in parts), torch.zeros(())) / len(update)
        case "dr_grpo":
            total = sum((part.sum() for part in parts), torch.zeros(()))
            return total / len(update) / cfg.rollout.max_completion_tokens
        case "dapo" | "cispo":
            of_update = tokens_of(rollout, cfg) / cfg.algorithm.updates_per_rollout
            return sum((part.sum() for part in parts), torch.zeros(())) / of_update
        case name:
            raise NotImplementedError(f"write the average of {name} into tests/helpers/reference_losses.py")


def total(samples: list[Sample], cfg: RunConfig) -> Tensor:
    """Sum the entropy over the tokens in the loss."""
    return sum((sample.entropy.sum() for sample in samples if counts(sample, cfg)), torch.zeros(()))


class Bonus:
    """The entropy bonus with its weight from update to update."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg, self.coef, self.last = cfg, cfg.algorithm.entropy_coef, math.inf

    def loss(self, update: list[Sample], rollout: list[Sample]) -> Tensor:
        """Return an update's share of the mean over the rollout's tokens; then adapt the weight for the next update."""
        algorithm, weight = self.cfg.algorithm, self.coef
        if algorithm.entropy_target is not None:
            weight = self.coef if self.last <= algorithm.entropy_target else 0.0
            self.last = (total(update, self.cfg) / max(1, tokens_of(update, self.cfg))).item()
            step = algorithm.entropy_coef_step * (1 if self.last <= algorithm.entropy_target else -1)
            self.coef = min(max(self.coef + step, 0.0), algorithm.entropy_coef_max)
        return -weight * total(update, self.cfg) / max(1, tokens_of(rollout, self.cfg)) * algorithm.updates_per_rollout


def clipped(samples: list[Sample], cfg: RunConfig) -> tuple[float, float]:
    """Return the shares of the loss's tokens clipped below and above, counting only clips that remove the gradient.

    For GSPO, shares of all completions; those outside the loss count as not clipped.
    """
    whole = cfg.algorithm.name == "gspo"
    parts = [(s, ratio(s, cfg).detach()[: 1 if whole else None]) for s in samples if counts(s, cfg)]
    low = sum(int((r < 1 - cfg.algorithm.epsilon_low).sum()) for sample, r in parts if sample.advantage < 0)
    high = sum(int((r > 1 + cfg.algorithm.epsilon_high).sum()) for sample, r in parts if sample.advantage > 0)
    size = len(samples) if whole else max(1, tokens_of(samples, cfg))
    return low / size, high / size
