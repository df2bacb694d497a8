"""Noise schedules: sigma of each step, or with `aqn.unit=kl` the target KL in nats per token."""

import math

from qerl_lab.config.schema import AqnConfig


def stage(step: int, total_steps: int, stages: int) -> int:
    """Return the stage (from 0) that `step` (from 1) belongs to, if the run is cut into `stages` equal parts.

    With more stages than steps some stages, evenly spread, have no step.
    """
    return (step - 1) * stages // total_steps


def level(cfg: AqnConfig, step: int, total_steps: int) -> float:
    """Return the noise level of a step in `cfg.unit`: sigma (a standard deviation), or a KL in nats per token.

    The level is 0 at step 0 (the untrained policy), and at all steps with schedule=off. With schedule=adaptive it is
    kl_start from step 1 on. With the other schedules it goes from the schedule's start towards its end, by stages; in
    the first stage it is 0, except when `cfg.reading` is "equation".
    """
    if cfg.schedule == "off" or step == 0:
        return 0.0
    if cfg.schedule == "adaptive":
        return cfg.kl_start
    now, last = stage(step, total_steps, cfg.stages), cfg.stages - 1
    if cfg.reading == "equation":  # Eq. 8: k = now + 1 of K noisy stages
        return decay(cfg, now, last)
    if now == 0:
        return 0.0
    # The first of K stages has no noise. The released code spreads K-1 values over stages 2..K; the paper's Algorithm 1
    # keeps the K-1 of Eq. 8 in the exponent.
    return decay(cfg, now - 1, last - 1 if cfg.reading == "released" else last)


def decay(cfg: AqnConfig, index: int, last: int) -> float:
    """Return the noise level, in `cfg.unit`, of noisy stage `index` (from 0) on a curve that ends at stage `last`.

    If `last` is 0, the level is the schedule's start. The exponential curve is Eq. 8 of the paper; the other shapes are
    in its Fig. 15. Raises ValueError for the schedules "off" and "adaptive", which have no curve.
    """
    progress = index / last if last > 0 else 0.0
    start, end = (cfg.kl_start, cfg.kl_end) if cfg.unit == "kl" else (cfg.sigma_start, cfg.sigma_end)
    match cfg.schedule:
        case "exponential":
            return start * (end / start) ** progress if start > 0 else 0.0
        case "linear":
            return start + (end - start) * progress
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * progress)) / 2
        case "logarithmic":
            return start + (end - start) * (math.log(index + 1) / math.log(last + 1) if last > 0 else 0.0)
    raise ValueError(f"aqn.schedule={cfg.schedule} is not a schedule")
