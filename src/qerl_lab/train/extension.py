"""Describe how extending a finished run changes its schedules, which depend on the number of steps."""

import math
from dataclasses import replace

from qerl_lab import aqn
from qerl_lab.config.schema import OptimConfig, RunConfig


def meaning(cfg: RunConfig) -> list[str]:
    """Return notes on what the last extension changes in the noise and learning-rate schedules.

    The first note says that the result differs from a run started with that number of steps.
    """
    was = replace(cfg, steps=cfg.extended[-1])
    lines = [f"extended from {was.steps} to {cfg.steps} steps: a run of {cfg.steps} from the start is another"]
    if cfg.aqn.schedule not in ("off", "adaptive"):
        before, after = aqn.level(was.aqn, was.steps, was.steps), aqn.level(cfg.aqn, was.steps + 1, cfg.steps)
        unit = "KL" if cfg.aqn.unit == "kl" else "sigma"
        lines.append(
            f"noise: {unit} {before:.3g} at step {was.steps}, {after:.3g} from step {was.steps + 1}: the "
            f"{cfg.aqn.stages} stages are of {cfg.steps} steps now"
        )
    if cfg.optim.schedule != "constant" or cfg.optim.warmup_ratio:
        before, after = (share(cfg.optim, at, of) * cfg.optim.learning_rate
                         for at, of in ((was.steps, was.steps), (was.steps + 1, cfg.steps)))  # fmt: skip
        lines.append(
            f"learning rate: {before:.3g} at step {was.steps}, {after:.3g} from step {was.steps + 1}: the "
            f"{cfg.optim.schedule} schedule is of {cfg.steps} steps now"
        )
    return lines


def share(cfg: OptimConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step's first update as a share of its peak, as transformers computes it."""
    done, rising = step - 1, math.ceil(cfg.warmup_ratio * steps)
    if done < rising:
        return done / rising
    left = (done - rising) / max(1, steps - rising)
    match cfg.schedule:
        case "linear":
            return 1 - left
        case "cosine":
            return (1 + math.cos(math.pi * left)) / 2
    return 1.0
