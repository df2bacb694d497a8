"""Algorithms: which advantages, which groups count, which loss. One file each; each opens with its departures.

The arithmetic itself is TRL's (`GRPOTrainer._compute_loss`), held to a float64 reference of the papers' formulas by
`tests/golden/test_loss.py`.
"""

import importlib
from typing import Any

from qerl_lab.config import AlgorithmConfig


def loss_settings(cfg: AlgorithmConfig) -> dict[str, Any]:
    """Keyword arguments of `trl.GRPOConfig` for this algorithm."""
    return {
        "loss_type": importlib.import_module(f"qerl_lab.algorithms.{cfg.name}").LOSS_TYPE,
        "epsilon": cfg.epsilon_low,
        "epsilon_high": cfg.epsilon_high,
        "beta": cfg.beta,
        "scale_rewards": "group" if cfg.normalize_std else "none",
        "num_iterations": cfg.num_iterations,
        "mask_truncated_completions": cfg.mask_truncated,
    }


def lacks(cfg: AlgorithmConfig) -> str:
    """What a user of the algorithm must know is not there yet; empty if nothing."""
    return importlib.import_module(f"qerl_lab.algorithms.{cfg.name}").LACKS
