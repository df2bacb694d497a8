"""Sigma for a target KL, in float64: on a softmax of a linear layer after a norm, and on KL curves of any shape."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from qerl_lab.aqn.solver import Solution, adapt_sigma, solve
from qerl_lab.config.schema import AqnAdaptiveConfig, AqnConfig, AqnSolverConfig

TOKENS, HIDDEN, WORDS, DRAWS = 40, 24, 50, 8


def config(tolerance: float = 1e-3, probes: int = 40, low: float = 1e-6, high: float = 0.5) -> AqnConfig:
    solver = AqnSolverConfig(tolerance=tolerance, probes=probes)
    return AqnConfig(schedule="linear", unit="kl", sigma_min=low, sigma_max=high, solver=solver)


class Toy:
    """A model with logits = (x * (1 + sigma Z)) U. The clean weight of the norm is 1; Z are a few fixed draws."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.x, self.u, self.z = normal(TOKENS, HIDDEN), normal(HIDDEN, WORDS) / HIDDEN**0.5, normal(DRAWS, HIDDEN)
        self.clean = (self.x @ self.u).log_softmax(-1)

    def kl(self, sigma: float) -> float:
        """Return KL(noisy || clean), the mean over tokens and draws."""
        noisy = ((self.x * (1 + sigma * self.z)[:, None]) @ self.u).log_softmax(-1)  # [draws, tokens, words]
        return (noisy.exp() * (noisy - self.clean)).sum(-1).mean().item()

    def fisher(self) -> float:
        """Return c of KL = c sigma^2 / 2 for small sigma: the variance of the logits' slope under the clean policy."""
        slope, p = (self.x * self.z[:, None]) @ self.u, self.clean.exp()
        return ((p * slope.square()).sum(-1) - (p * slope).sum(-1).square()).mean().item()

    def bisected(self, target: float) -> float:
        low, high = 1e-8, 1e3
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if self.kl(middle) < target else (low, middle)
        return low


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("target", [1e-5, 1e-3, 0.03, 0.2])
@pytest.mark.parametrize("guess", [1e-6, 0.02, 0.5])
def test_sigma_equals_the_sigma_that_bisection_finds(seed: int, target: float, guess: float) -> None:
    toy = Toy(seed)
    found = solve(config(high=10), toy.kl, target, guess)
    assert found.kl == toy.kl(found.sigma) == pytest.approx(target, rel=1e-3)
    assert found.sigma == pytest.approx(toy.bisected(target), rel=1e-3)
    assert found.probes <= 10


def test_sigma_for_a_small_kl_follows_from_the_fisher_information() -> None:
    toy = Toy()
    for target in (1e-8, 1e-6):
        assert solve(config(), toy.kl, target, 0.01).sigma == pytest.approx(
            (2 * target / toy.fisher()) ** 0.5, rel=0.01
        )


def test_two_probes_find_sigma_if_the_kl_is_quadratic() -> None:
    found = solve(config(), lambda sigma: 7 * sigma**2, 0.003, 0.1)
    assert (found.sigma, found.probes) == (pytest.approx((0.003 / 7) ** 0.5), 2)
    assert solve(config(), lambda sigma: 7 * sigma**2, 0.003, found.sigma) == Solution(found.sigma, found.kl, 1)


@pytest.mark.parametrize(
    ("kl", "sigma"),
    [
        (lambda sigma: 1e-9 * sigma**2, 0.5),  # noise with almost no effect
        (lambda sigma: 0.0, 0.5),
        (lambda sigma: -1e-12, 0.5),  # by rounding
        (lambda sigma: 1e9 * sigma, 1e-6),
        (lambda sigma: math.inf, 1e-6),
        (lambda sigma: math.nan, 1e-6),
        (lambda sigma: 0.01 + sigma**2, 1e-6),  # more than the target by rounding alone
        (lambda sigma: 0.01 + sigma**2 - 1e-4 * math.exp(-(math.log(sigma / 1e-4) ** 2)), 1e-6),  # and not monotonic
    ],
)
@pytest.mark.parametrize("guess", [1e-6, 0.01, 0.5, 3.0])
def test_sigma_is_the_bound_if_the_target_is_beyond_it(
    kl: Callable[[float], float], sigma: float, guess: float
) -> None:
    found = solve(config(tolerance=0.05, probes=12), kl, 3e-3, guess)
    assert found.sigma == sigma
    assert found.probes <= 12


def test_a_model_that_breaks_gets_the_largest_noise_without_nan() -> None:
    found = solve(config(probes=40), lambda sigma: math.nan if sigma > 0.03 else sigma**2, 0.1, 0.01)
    assert found.sigma <= 0.03
    assert found.sigma == pytest.approx(0.03, rel=0.01)
    assert found.probes < 40


SHAPES = ["power", "grows faster", "saturates", "has a floor", "jumps"]


def never_falling(shape: str, draw: random.Random) -> tuple[Callable[[float], float], float]:
    """Return a KL as a function of sigma, and the sigma of its jump if it has one."""
    power, scale, place = draw.uniform(0.5, 4), 10 ** draw.uniform(-3, 6), 10 ** draw.uniform(-5, -0.5)

    def kl(sigma: float) -> float:
        value = scale * sigma**power
        match shape:
            case "grows faster":
                return value * math.exp(min(sigma / place, 600))
            case "saturates":
                return 2 * -math.expm1(-value)
            case "has a floor":
                return value + 1e-4
            case "jumps":
                return value if sigma < place else value + 1
        return value

    return kl, place


@pytest.mark.parametrize("shape", SHAPES)
def test_sigma_is_found_for_any_kl_that_never_falls(shape: str) -> None:
    """The result is within the bounds, was measured, is the nearest tried, and is near the target if any sigma is."""
    draw, reached = random.Random(shape), 0
    for _ in range(1000):
        kl, place = never_falling(shape, draw)
        target, guess = 10 ** draw.uniform(-7, 0.5), 10 ** draw.uniform(-7, 0.7)
        tolerance = draw.choice([1e-3, 0.05, 1])
        cfg, asked = config(tolerance, probes=100), list[float]()

        def measure(sigma: float, kl: Callable[[float], float] = kl, asked: list[float] = asked) -> float:
            asked.append(sigma)
            return kl(sigma)

        found = solve(cfg, measure, target, guess)
        gap = abs(math.log(found.kl / target))
        assert (found.sigma in asked, found.kl, found.probes) == (True, kl(found.sigma), len(asked))
        assert min(abs(math.log(kl(sigma) / target)) for sigma in asked) == gap
        assert all(cfg.sigma_min <= sigma <= cfg.sigma_max for sigma in asked)
        near = gap <= math.log1p(tolerance) + 1e-12
        out_of_reach = kl(cfg.sigma_max) < target or kl(cfg.sigma_min) > target
        over_a_jump = shape == "jumps" and kl(0.999 * place) < target < kl(place)
        assert near or out_of_reach or over_a_jump, (target, guess, tolerance, found)
        assert len(asked) <= 60 or shape == "jumps"
        reached += near
    assert reached > 300


# --- the controller


def controlled(factor: float = 1.01, band: float = 1.1) -> AqnConfig:
    adaptive = AqnAdaptiveConfig(factor=factor, band=band)
    return AqnConfig(schedule="adaptive", unit="kl", kl_start=0.003, adaptive=adaptive)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (0.0, 0.0404), (0.0027, 0.0404), (0.00274, 0.04), (0.003, 0.04), (0.00329, 0.04), (0.00331, 0.04 / 1.01),
        (5.0, 0.04 / 1.01), (math.inf, 0.04 / 1.01), (math.nan, 0.04 / 1.01), (-1e-9, 0.0404),
    ],
)  # fmt: skip
def test_the_controller_follows_the_rule_of_psn_rlvr(kl: float, expected: float) -> None:
    """The trainer of PSN-RLVR divides above 1.1 x target, multiplies below target / 1.1, and otherwise keeps sigma."""
    assert adapt_sigma(controlled(), 0.04, kl) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("kl", "expected"), [(0.0029999, 0.0404), (0.003, 0.04), (0.0030001, 0.04 / 1.01)])
def test_a_band_of_1_is_the_rule_of_plappert(kl: float, expected: float) -> None:
    assert adapt_sigma(controlled(band=1), 0.04, kl) == pytest.approx(expected, rel=1e-12)


def test_the_controller_stays_in_its_bounds_and_comes_to_the_target() -> None:
    assert adapt_sigma(controlled(factor=2), 0.4, 0.0) == 0.5
    assert adapt_sigma(controlled(factor=2), 1.5e-6, 1.0) == 1e-6
    toy, sigma = Toy(), 0.5
    for _ in range(400):
        sigma = adapt_sigma(controlled(), sigma, toy.kl(sigma))
    assert 0.003 / 1.13 < toy.kl(sigma) < 0.003 * 1.13
