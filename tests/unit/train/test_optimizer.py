"""What `optim` says reaches the optimizer of the training: rates, betas, weight decay, clipping."""

from pathlib import Path

import pytest
import torch

from trained import Jittered, train


def test_rates_betas_decay_and_clipping_are_those_asked_for(tiny, build_policy, tmp_path: Path) -> None:
    """Four steps of two updates, half of them with a linear warm-up. Every value differs from TRL's default."""
    optim = {"learning_rate": 0.01, "warmup_ratio": 0.5, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.95}
    optim |= {"max_grad_norm": 1e-3, "micro_batch_size": 4}
    words = {f"optim__{name}": value for name, value in optim.items()}
    cfg = tiny(steps=4, algorithm__updates_per_rollout=2, **words)
    policy = build_policy(cfg)
    trained = train(cfg, policy, Jittered(policy, 64), tmp_path)
    assert trained.rates == pytest.approx([0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01])
    groups = [group for group in trained.trainer.optimizer.param_groups if group["params"]]
    assert {(*group["betas"], group["weight_decay"]) for group in groups} == {(0.7, 0.95, 0.2)}
    norms = [torch.cat([grad.flatten() for grad in update.values()]).norm().item() for update in trained.gradients]
    assert norms == pytest.approx([1e-3] * 8, rel=1e-2)
