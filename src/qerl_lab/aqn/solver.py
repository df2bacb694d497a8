"""Choose sigma for a target KL: by a search (`solve`), or by adjusting it after each step (`adapt_sigma`).

KL(noisy || clean) grows as sigma^2 while sigma is small (half of sigma^2 times the Fisher information of the norms).
Beyond that it grows faster or slower. So log KL over log sigma is nearly a line of slope 2, and `solve` searches a zero
of log(KL / target).

`adapt_sigma` is the controller of Plappert et al. (arXiv 1706.01905, Sec. 3 and App. C) as implemented in PSN-RLVR's
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
from typing import NamedTuple

from qerl_lab.config.schema import AqnConfig

SLOPE = 2.0  # of log KL over log sigma, for small sigma
LEAP = math.log(100)  # largest step of log sigma outside a bracket, where the line no longer holds


@dataclass(frozen=True)
class Solution:
    """The sigma that a search found, its measured KL in nats per token, and how many sigmas were tried (`probes`)."""

    sigma: float
    kl: float
    probes: int


class Attempt(NamedTuple):
    """A sigma that the search tried, and its measured KL in nats per token. `gap` is log(KL / target)."""

    log_sigma: float
    sigma: float
    kl: float
    gap: float


def solve(cfg: AqnConfig, measure: Callable[[float], float], target: float, guess: float) -> Solution:
    """Search in sigma_min..sigma_max for the sigma at which the KL is `target`.

    Stops as soon as a KL is within the factor 1 + solver.tolerance of `target`, or at a bound of sigma if the target
    lies beyond that bound. After solver.probes tries, or if the KL jumps over the target, it returns the tried sigma
    with the nearest KL. A NaN KL counts as infinite, a KL of 0 or less as 0.

    Args:
        measure: returns the KL in nats per token of a sigma; must not fall as sigma grows.
        target: KL in nats per token, above 0.
        guess: first sigma to try, clamped to sigma_min..sigma_max.
    """
    low, high = math.log(cfg.sigma_min), math.log(cfg.sigma_max)
    exact = {low: cfg.sigma_min, high: cfg.sigma_max}  # exp would round
    near, tried = math.log1p(cfg.solver.tolerance), list[Attempt]()
    log_sigma: float | None = math.log(guess)
    while log_sigma is not None and len(tried) < cfg.solver.probes:
        log_sigma = min(max(log_sigma, low), high)
        sigma = exact.get(log_sigma, math.exp(log_sigma))
        kl = measure(sigma)
        gap = _gap(kl, target)
        tried.append(Attempt(log_sigma, sigma, kl, gap))
        if abs(gap) <= near:
            break
        is_target_beyond_bound = (gap < 0 and log_sigma == high) or (gap > 0 and log_sigma == low)
        if is_target_beyond_bound:
            # Another sigma may have a nearer KL by chance: all small sigmas measure about the KL of rounding.
            return Solution(sigma, kl, len(tried))
        log_sigma = _next_log_sigma(tried, near)
    best = min(reversed(tried), key=lambda attempt: abs(attempt.gap))  # the last of equals
    return Solution(best.sigma, best.kl, len(tried))


def _gap(kl: float, target: float) -> float:
    """Return log(KL / target). A NaN KL counts as infinite, a KL of 0 or less as 0."""
    if math.isnan(kl):
        return math.inf
    return math.log(kl / target) if kl > 0 else -math.inf


def _next_log_sigma(tried: list[Attempt], near: float) -> float | None:
    """Return the next log sigma to try; None to end the search. `near` is log(1 + solver.tolerance).

    While all attempts are on one side of the target, follow a line through the last attempt to the target, but not by
    more than `LEAP`. Its slope is `SLOPE`, or the slope between the last two attempts if that is smaller, but at least
    SLOPE / 10. Too small a slope overshoots the target, which helps: then attempts lie on both sides of it.

    With attempts on both sides, take the zero of the secant between the two nearest. Take their middle if one of their
    KLs is 0 or infinite, or if the last two attempts were on the same side. End the search if the two are closer than
    near / 10 in log sigma: the KL jumps over the target between them.
    """
    too_high = [attempt for attempt in tried if attempt.gap > 0]
    above = min(too_high, key=lambda attempt: attempt.log_sigma, default=None)
    too_low = [
        attempt for attempt in tried if attempt.gap < 0 and (above is None or attempt.log_sigma < above.log_sigma)
    ]
    below = max(too_low, key=lambda attempt: attempt.log_sigma, default=None)
    if above is None or below is None:
        last, slope = tried[-1], SLOPE
        if len(tried) > 1 and math.isfinite(last.gap) and math.isfinite(tried[-2].gap):
            measured_slope = (last.gap - tried[-2].gap) / (last.log_sigma - tried[-2].log_sigma)
            slope = min(max(measured_slope, SLOPE / 10), SLOPE)
        return last.log_sigma - min(max(last.gap / slope, -LEAP), LEAP)
    distance = above.log_sigma - below.log_sigma
    if distance < near / 10:
        return None
    one_side_moved_twice = len(tried) > 2 and (tried[-1].gap > 0) == (tried[-2].gap > 0)
    if math.isinf(below.gap) or math.isinf(above.gap) or one_side_moved_twice:
        return (below.log_sigma + above.log_sigma) / 2
    return below.log_sigma + -below.gap / (above.gap - below.gap) * distance


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
