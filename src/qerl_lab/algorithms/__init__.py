"""Algorithms: which advantages, which groups count, which loss. One file each: objective, source, departures.

The advantages are those of `groups`, the weights that correct for noisy sampling those of `correction`, the arithmetic
of the loss is TRL's (`GRPOTrainer._compute_loss`); all are held to a float64 reference of the papers' formulas by
`tests/golden/test_loss.py` and `tests/golden/test_objective.py`. docs/algorithms.md has them side by side.

In the formulas: o_i is completion i of G, |o_i| its length in tokens, r_it = pi(o_it) / pi_old(o_it) the probability
ratio, pi_old the policy that made the rollout, A_i the advantage, e_low and e_high the two clips.
"""

import importlib
from typing import Any

from qerl_lab.config.schema import AlgorithmConfig


def loss_settings(cfg: AlgorithmConfig) -> dict[str, Any]:
    """Keyword arguments of `trl.GRPOConfig` for this algorithm."""
    algorithm = importlib.import_module(f"qerl_lab.algorithms.{cfg.name}")
    return {
        "loss_type": algorithm.LOSS_TYPE,
        "importance_sampling_level": algorithm.RATIO_OF,
        "epsilon": cfg.epsilon_low,
        # With CISPO it is the bound itself in TRL, not its distance from 1.
        "epsilon_high": cfg.epsilon_high + (algorithm.LOSS_TYPE == "cispo"),
        "beta": cfg.beta,
        "use_bias_correction_kl": cfg.kl_estimator == "k3_ratio",
        "scale_rewards": "group" if cfg.normalize_std else "none",
        "num_iterations": cfg.num_iterations,
        "entropy_coef": cfg.entropy_coef,
        "use_adaptive_entropy": cfg.entropy_target is not None,
        "entropy_target": cfg.entropy_target or 0.0,
        "entropy_coef_delta": cfg.entropy_coef_step,
        "entropy_coef_max": cfg.entropy_coef_max,
    }


def has_bonus(cfg: AlgorithmConfig) -> bool:
    """Whether the objective has the entropy in it, in some update at least."""
    return cfg.entropy_coef > 0 or cfg.entropy_target is not None
