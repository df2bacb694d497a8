"""Choose sigma for a target KL: by a search (`solve`), or by adjusting it after each step (`adapt_sigma`).

KL(noisy || clean) grows as sigma^2 while sigma is small (half of sigma^2 times the Fisher information of the norms).
Beyond that it grows faster or slower. So log KL over log sigma is nearly a line of slope 2, and `solve` searches a zero
of log(KL / target).

The controller is Plappert et al.'s (arXiv 1706.01905, Sec. 3 and App. C) as implemented in PSN-RLVR's
released code (arXiv 2602.02555, variant I, github.com/baibizhe/psn_rlvr). Departures from both:

1. The distance is the KL over the whole vocabulary on aqn.probe_prompts completions of the step. Plappert measures a
   policy with few actions. PSN-RLVR averages sampler - trainer log-prob over the sampled tokens: the same mean, but it
   includes the mismatch of the kernels.
2. Noise is on norms only. PSN-RLVR adds it to the MLP's weights.
3. PSN-RLVR's variant II uses embeddings of the completions and the model's certainty instead of the KL. Its authors
   have not released it; it is not here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from qerl_lab.config.schema import AqnConfig

SLOPE = 2.0  # of log KL over log sigma, for small sigma
LEAP = math.log(100)  # largest step of log sigma outside a bracket, where the line no longer holds


@dataclass(frozen=True)
class Solution:
    """The sigma that a search found, its measured KL in nats per token, and how many sigmas were tried (`probes`)."""

    sigma: float
    kl: float
    probes: int


def solve(cfg: AqnConfig, measure: Callable[[float], float], target: float, guess: float) -> Solution:
    """Search in sigma_min..sigma_max for the sigma at which the KL is `target`.

    Stops as soon as a KL is within the factor 1 + solver.tolerance of `target`, or at a bound of sigma if the target
    lies beyond that bound. After solver.probes tries, or if the KL jumps over the target, it returns the tried sigma
    with the nearest KL. A NaN KL counts as infinite, a KL of 0 or less as 0.

    Args:
        measure: returns the KL in nats per token of a sigma; must not fall as sigma grows.
        target: KL in nats per token, above 0, else raises ValueError.
        guess: first sigma to try, clamped to sigma_min..sigma_max.
    """
    if target <= 0:
        raise ValueError(f"a KL of {target} is not solved for; allowed: above 0")
    low, high = math.log(cfg.sigma_min), math.log(cfg.sigma_max)
    near, tried, kls = math.log1p(cfg.solver.tolerance), list[Point](), list[float]()
    at: float | None = math.log(guess)
    while at is not None and len(tried) < cfg.solver.probes:
        at = min(max(at, low), high)
        kl = measure(_exp_within_bounds(cfg, at))
        gap = math.log(kl / target) if kl > 0 else math.inf if math.isnan(kl) else -math.inf
        kls.append(kl)
        tried.append((at, gap))
        if abs(gap) <= near:
            break
        if (gap < 0 and at == high) or (gap > 0 and at == low):
            # Return the bound, not the nearest: below the KL of rounding all KLs are alike, so a large sigma may win.
            return Solution(_exp_within_bounds(cfg, at), kl, len(tried))
        at = _next_log_sigma(tried, near)
    best = min(reversed(range(len(tried))), key=lambda index: abs(tried[index][1]))  # the last of equals
    return Solution(_exp_within_bounds(cfg, tried[best][0]), kls[best], len(tried))


def _exp_within_bounds(cfg: AqnConfig, at: float) -> float:
    """Convert the log sigma `at` to sigma. The log of sigma_min or sigma_max gives that bound exactly."""
    bounds = {math.log(bound): bound for bound in (cfg.sigma_min, cfg.sigma_max)}
    return bounds.get(at, math.exp(at))


Point = tuple[float, float]  # log sigma, log(KL / target)


def _next_log_sigma(tried: list[Point], near: float) -> float | None:
    """Return the next log sigma to try, from the points tried so far. `near` is log(1 + solver.tolerance).

    With points on both sides of the target it is the zero of the secant between the two nearest, or their middle.
    Otherwise it is an extrapolation. None if these two points are closer than near / 10 in log sigma, because between
    them the KL jumps over the target.
    """
    above = min((point for point in tried if point[1] > 0), default=None)
    below = max((point for point in tried if point[1] < 0 and (above is None or point[0] < above[0])), default=None)
    if above is None or below is None:
        return _extrapolate_log_sigma(tried)
    (left, under), (right, over) = below, above
    if right - left < near / 10:
        return None
    one_side_moved_twice = len(tried) > 2 and (tried[-1][1] > 0) == (tried[-2][1] > 0)
    if math.isinf(under) or math.isinf(over) or one_side_moved_twice:
        return (left + right) / 2
    return left + -under / (over - under) * (right - left)


def _extrapolate_log_sigma(tried: list[Point]) -> float:
    """Return the log sigma at which a line through the last tried point reaches the target.

    The line's slope is `SLOPE`, or that of the last two points if it is smaller. Too small a slope overshoots the
    target, which helps: then points lie on both sides of it.
    """
    at, gap = tried[-1]
    slope = SLOPE
    if len(tried) > 1 and math.isfinite(gap) and math.isfinite(tried[-2][1]):
        slope = min(max((gap - tried[-2][1]) / (at - tried[-2][0]), SLOPE / 10), SLOPE)
    return at - min(max(gap / slope, -LEAP), LEAP)


def adapt_sigma(cfg: AqnConfig, sigma: float, kl: float) -> float:
    """Return the next step's sigma from this step's measured KL in nats per token.

    Sigma is multiplied by adaptive.factor if the KL is below kl_start / adaptive.band, divided by it if the KL is above
    kl_start x band or NaN, and clamped to sigma_min..sigma_max.
    """
    target, band = cfg.kl_start, cfg.adaptive.band
    if kl < target / band:
        sigma *= cfg.adaptive.factor
    elif not kl <= target * band:
        sigma /= cfg.adaptive.factor
    return min(max(sigma, cfg.sigma_min), cfg.sigma_max)
