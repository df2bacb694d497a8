"""Full-parameter training against a loop in float64: the losses of the papers, clipping and AdamW from their formulas.

The loop's model is transformers' own, loaded from the pocket's files; it shares only the completions that were sampled.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_lab.model.on_disk import ASSETS
from qerl_lab.train.step import Batch
from reference_losses import Sample, advantages, policy_loss
from trained import Jittered, train

pytestmark = pytest.mark.usefixtures("drawn_once")
STEPS = 3


class ReferenceAdamW:
    """AdamW (arXiv 1711.05101, Algorithm 2), with the gradients clipped to a norm first, in float64."""

    def __init__(self, weights: dict[str, Tensor], rate: float, decay: float, betas: tuple[float, float]) -> None:
        self.weights, self.rate, self.decay, self.betas, self.count = weights, rate, decay, betas, 0
        self.first, self.second = ({name: torch.zeros_like(w) for name, w in weights.items()} for _ in range(2))

    def step(self, gradients: dict[str, Tensor], most: float) -> float:
        """Update the weights; return the norm of the gradients before it was clipped."""
        norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item()
        self.count += 1
        for name, weight in self.weights.items():
            gradient = gradients[name] * min(1.0, most / (norm + 1e-6))
            first, second = self.first[name], self.second[name]
            first.mul_(self.betas[0]).add_(gradient, alpha=1 - self.betas[0])
            second.mul_(self.betas[1]).add_(gradient.square(), alpha=1 - self.betas[1])
            mean, spread = first / (1 - self.betas[0] ** self.count), second / (1 - self.betas[1] ** self.count)
            decay = 0.0 if "norm" in name or name.endswith("bias") else self.decay  # transformers' rule
            weight.data -= self.rate * (mean / (spread.sqrt() + 1e-8) + decay * weight.data)
        return norm


def samples_of(batch: Batch, model: torch.nn.Module, normalize_std: bool) -> list[Sample]:
    """Return the completions of a batch with their log-probs under `model`, with gradients."""
    found = []
    rewards_P_G = np.array([group.reward_G for group in batch.groups])
    for group, own in zip(batch.groups, advantages(rewards_P_G, normalize_std), strict=True):
        for (tokens, sampler, *_), advantage in zip(group.completions_G, own, strict=True):
            logits = model(input_ids=torch.tensor([group.prompt_ids + tokens])).logits[0]
            new = logits[len(group.prompt_ids) - 1 : -1].log_softmax(-1)[torch.arange(len(tokens)), tokens]
            told = torch.tensor(sampler, dtype=torch.float64)
            found.append(Sample(group.prompt_ids, tokens, new.detach(), told, new.detach(), advantage, new))
    return found


def test_updates_of_all_weights_follow_the_formulas(tiny, build_policy, tmp_path: Path) -> None:
    cfg = tiny(
        lora__rank=0, format__name="bf16", steps=STEPS, algorithm__name="dapo", optim__learning_rate=1e-3,
        optim__weight_decay=0.1, optim__beta1=0.8, optim__beta2=0.95, optim__max_grad_norm=0.05,
    )  # fmt: skip
    policy = build_policy(cfg)
    run = train(cfg, policy, Jittered(policy, 64), tmp_path)

    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float64, use_safetensors=True)
    weights = dict(model.named_parameters())
    began = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = ReferenceAdamW(weights, 1e-3, 0.1, (0.8, 0.95))
    for batch, metrics in zip(run.batches, run.steps, strict=True):
        samples = samples_of(batch, model, cfg.algorithm.normalize_std)
        gradients = torch.autograd.grad(policy_loss(samples, samples, cfg), list(weights.values()))
        norm = optimizer.step(dict(zip(weights, gradients, strict=True)), cfg.optim.max_grad_norm)
        assert norm == pytest.approx(metrics["policy/grad_norm"], rel=1e-3)
    assert {name for name, _ in policy.model.named_parameters()} == weights.keys()
    for name, weight in policy.model.named_parameters():
        moved, expected = weight.detach().double() - began[name], weights[name].detach() - began[name]
        assert (moved - expected).norm() < 2e-3 * expected.norm(), name  # the largest seen is 4e-4, of the embedding
