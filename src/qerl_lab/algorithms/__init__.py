"""RL algorithms, one file each: the objective, its source and the departures from its paper.

`groups` computes the advantages, `correction` the importance weights for noisy sampling. TRL computes the loss
(`GRPOTrainer._compute_loss`). `tests/golden/test_loss.py` and `tests/golden/test_objective.py` compare all three with a
float64 reference of the papers' formulas. docs/algorithms.md compares the algorithms.

Symbols: o_i is completion i of G and |o_i| its length in tokens. r_it = pi(o_it) / pi_old(o_it) is the probability
ratio, pi_old the policy at the time of the rollout, A_i the advantage, e_low and e_high the two clips.
"""

import importlib
from typing import Any

from qerl_lab.config.schema import AlgorithmConfig


def loss_settings(cfg: AlgorithmConfig) -> dict[str, Any]:
    """Return keyword arguments of `trl.GRPOConfig` that select the loss of `cfg`: ratio, clips, KL, entropy bonus."""
    algorithm = importlib.import_module(f"qerl_lab.algorithms.{cfg.name}")
    is_cispo = algorithm.LOSS_TYPE == "cispo"
    return {
        "loss_type": algorithm.LOSS_TYPE,
        "importance_sampling_level": algorithm.RATIO_OF,
        "epsilon": cfg.epsilon_low,
        # TRL's CISPO takes the bound itself, the other losses its distance from 1.
        "epsilon_high": 1 + cfg.epsilon_high if is_cispo else cfg.epsilon_high,
        "beta": cfg.beta,
        "use_bias_correction_kl": cfg.kl_estimator == "k3_ratio",
        "num_iterations": cfg.num_iterations,
        "entropy_coef": cfg.entropy_coef,
        "use_adaptive_entropy": cfg.entropy_target is not None,
        "entropy_target": cfg.entropy_target or 0.0,
        "entropy_coef_delta": cfg.entropy_coef_step,
        "entropy_coef_max": cfg.entropy_coef_max,
    }
