"""Algorithms: which advantages, which groups count, which loss. One file each; each opens with its departures.

The advantages are those of `groups`, the weights that correct for noisy sampling those of `correction`, the arithmetic
of the loss is TRL's (`GRPOTrainer._compute_loss`); all are held to a float64 reference of the papers' formulas by
`tests/golden/test_loss.py`.
"""

import importlib
from typing import Any

from qerl_lab.config.schema import AlgorithmConfig


def loss_settings(cfg: AlgorithmConfig) -> dict[str, Any]:
    """Keyword arguments of `trl.GRPOConfig` for this algorithm."""
    return {
        "loss_type": importlib.import_module(f"qerl_lab.algorithms.{cfg.name}").LOSS_TYPE,
        "epsilon": cfg.epsilon_low,
        "epsilon_high": cfg.epsilon_high,
        "beta": cfg.beta,
        "scale_rewards": "group" if cfg.normalize_std else "none",
        "num_iterations": cfg.num_iterations,
    }


def left_out(cfg: AlgorithmConfig) -> str:
    """Say which parts of the algorithm this configuration leaves out, and what to type for them; empty if none."""
    parts = importlib.import_module(f"qerl_lab.algorithms.{cfg.name}").PARTS
    off = [typed for key, typed in parts.items() if not getattr(cfg, key)]
    return f"algorithm={cfg.name} leaves out parts of its paper. Type {' '.join(off)} to have them." if off else ""
