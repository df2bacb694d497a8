"""Sigma for a KL: found by a search (`solve`), or followed step by step (`adapted`).

KL(noisy || clean) grows as sigma^2 while sigma is small (it is half of sigma^2 times the Fisher information of the
norms), and faster or slower once it is not. So log KL over log sigma is nearly a line of slope 2, and `solve` is a
search for a zero on it.

The controller is Plappert et al.'s (arXiv 1706.01905, Sec. 3 and App. C) as PSN-RLVR's released code has it (arXiv
2602.02555, variant I, github.com/baibizhe/psn_rlvr). It departs from both:

1. The distance is the KL over the whole vocabulary on aqn.probe_prompts completions of the step. Plappert's is that of
   a policy with few actions; PSN-RLVR's is the mean of sampler - trainer log-probability over the sampled tokens, which
   has the same mean and the gap of the kernels in it.
2. Noise is on norms alone. PSN-RLVR's is on the MLP's weights.
3. PSN-RLVR's variant II follows embeddings of the completions and the model's certainty instead of the KL. Its authors
   have not released it; it is not here.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from qerl_lab.config.schema import AqnConfig

SLOPE = 2.0  # of log KL over log sigma, for small sigma
LEAP = math.log(100)  # furthest that sigma moves at once where nothing bounds it: KL is then no line any more


@dataclass(frozen=True)
class Found:
    """A sigma, the KL that was measured with it in nats per token, and how many sigmas were tried."""

    sigma: float
    kl: float
    probes: int


def solve(cfg: AqnConfig, measure: Callable[[float], float], target: float, guess: float) -> Found:
    """Search the sigma in sigma_min..sigma_max whose KL is `target`; a pure function of what `measure` gives.

    Ends within solver.tolerance of the target or after solver.probes, with the nearest that was tried; or with a bound
    beyond which the target lies. A KL that is NaN counts as infinite, and one of 0 or less as 0.

    Args:
        measure: KL in nats per token of a sigma, never falling in it.
        target: above 0.
        guess: the sigma that is tried first, moved between the bounds.

    Raises:
        ValueError: target of 0 or less.
    """
    if target <= 0:
        raise ValueError(f"a KL of {target} is not solved for; allowed: above 0")
    low, high = math.log(cfg.sigma_min), math.log(cfg.sigma_max)
    near, tried, kls = math.log1p(cfg.solver.tolerance), list[Point](), list[float]()
    at: float | None = math.log(guess)
    while at is not None and len(tried) < cfg.solver.probes:
        at = min(max(at, low), high)
        kl = measure(_sigma(cfg, at))
        gap = _log_gap(kl, target)
        kls.append(kl)
        tried.append((at, gap))
        if abs(gap) <= near:
            break
        if (gap < 0 and at == high) or (gap > 0 and at == low):
            # Not the nearest: below what rounding alone gives all KLs are alike, and one of much noise may be nearest.
            return Found(_sigma(cfg, at), kl, len(tried))
        at = _next(tried, near)
    best = min(reversed(range(len(tried))), key=lambda index: abs(tried[index][1]))  # of equals the last
    return Found(_sigma(cfg, tried[best][0]), kls[best], len(tried))


def _sigma(cfg: AqnConfig, at: float) -> float:
    """Of a bound's logarithm the bound itself, which the exponential misses by a rounding."""
    bounds = {math.log(bound): bound for bound in (cfg.sigma_min, cfg.sigma_max)}
    return bounds.get(at, math.exp(at))


def _log_gap(kl: float, target: float) -> float:
    if math.isnan(kl):
        return math.inf
    return math.log(kl / target) if kl > 0 else -math.inf


Point = tuple[float, float]  # log sigma, log(KL / target)


def _next(tried: list[Point], near: float) -> float | None:
    """The log sigma to try: on the line through the bracket, or through the last two where nothing bounds it.

    None where the bracket is too narrow to hold more than a jump of the KL.
    """
    above = min((point for point in tried if point[1] > 0), default=None)
    below = max((point for point in tried if point[1] < 0 and (above is None or point[0] < above[0])), default=None)
    if above is None or below is None:
        return _beyond(tried)
    (left, under), (right, over) = below, above
    if right - left < near / 10:
        return None
    one_side_moved_twice = len(tried) > 2 and (tried[-1][1] > 0) == (tried[-2][1] > 0)
    if math.isinf(under) or math.isinf(over) or one_side_moved_twice:
        return (left + right) / 2
    return left + -under / (over - under) * (right - left)


def _beyond(tried: list[Point]) -> float:
    """Extrapolate with SLOPE, or less if the last two points show less: overshooting brackets, undershooting not."""
    at, gap = tried[-1]
    slope = SLOPE
    if len(tried) > 1 and math.isfinite(gap) and math.isfinite(tried[-2][1]):
        slope = min(max((gap - tried[-2][1]) / (at - tried[-2][0]), SLOPE / 10), SLOPE)
    return at - min(max(gap / slope, -LEAP), LEAP)


def adapted(cfg: AqnConfig, sigma: float, kl: float) -> float:
    """Sigma of the next step, from the KL in nats per token that this step's sigma was measured to have.

    It grows by adaptive.factor under kl_start / adaptive.band, shrinks over kl_start x band and where KL is NaN, and
    stays in sigma_min..sigma_max.
    """
    target, band = cfg.kl_start, cfg.adaptive.band
    if kl < target / band:
        sigma *= cfg.adaptive.factor
    elif not kl <= target * band:
        sigma /= cfg.adaptive.factor
    return min(max(sigma, cfg.sigma_min), cfg.sigma_max)
