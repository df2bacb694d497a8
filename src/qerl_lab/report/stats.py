"""Confidence intervals over seeds and questions, p-values that agree with them, and pass@k.

Suffixes of arrays name their axes: `_S` seeds, `_Q` questions, `_T` steps or times. docs/comparison.md and
docs/verdicts.md have the simulated coverage of these intervals and tests.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import optimize, stats

Interval = tuple[float, float, float]  # mean, low, high
SHARE, CHANGE, NATS = (0.0, 1.0), (-1.0, 1.0), (0.0, math.inf)  # ranges of fractions, of their changes, of entropies
NO_SPREAD = "[no spread]"
NO_WIDTH = 1e-12  # spreads below this are rounding
MOST_SEEDS = 1000  # upper limit of the search for enough seeds


def format_change(value: float) -> str:
    """Format a difference or a gain with its sign: `+0.013`."""
    return f"{value:+.3f}"


def format_interval(low: float, high: float, spelled: Callable[[float], str] = format_change) -> str:
    """Format an interval as `[-0.010, +0.250]`; or `[no spread]` if both are equal, because `[x, x]` would mislead."""
    return NO_SPREAD if high - low <= NO_WIDTH else f"[{spelled(low)}, {spelled(high)}]"


def paired_interval(before: pd.Series, after: pd.Series, level: float = 0.95) -> Interval:
    """Return the mean per-question difference `after - before` of one run, with Student's t interval over questions.

    The difference is paired, because the same questions are asked twice and their difficulty cancels (Miller, arXiv
    2411.00640). Both series are indexed by question id. Raises ValueError unless they hold the same questions, at least
    two.
    """
    if set(before.index) != set(after.index) or len(before) < 2:
        raise ValueError("a paired interval needs the same questions before and after, two at least")
    difference = (after - before.reindex(after.index)).to_numpy(float)
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half = stats.t.ppf(0.5 + level / 2, len(difference) - 1) * error
    return float(mean), float(mean - half), float(mean + half)


def over_seeds(values_S_Q: np.ndarray, level: float = 0.95, least: float = 0.0) -> Interval:
    """Return the mean of values[seeds, questions] with its interval when both seeds and questions are sampled.

    Two-way random effects: value = mean + seed + question + rest. The squared half width is the sum of two squares,
    each of a standard error times its quantile of Student's t. The first has the variance of seeds' means, which covers
    seed and rest, and is at least `least` (see `jackknife`). The second has the variance of questions, which all seeds
    share. Raises ValueError for fewer than two seeds, and for missing values.
    """
    values = np.asarray(values_S_Q, float)
    if values.ndim != 2 or len(values) < 2 or not values.size or not np.isfinite(values).all():
        raise ValueError("an interval over seeds needs two seeds at least, and every value")
    of_seeds, of_questions = variance_components(values)
    mean, half = values.mean(), half_width((max(of_seeds, least), of_questions), len(values), values.shape[1], level)
    return float(mean), float(mean - half), float(mean + half)


def variance_components(values_S_Q: np.ndarray, floored: bool = False) -> tuple[float, float]:
    """Return (variance of seeds' means, variance of questions) of values[seeds, questions], by analysis of variance.

    The variance of questions is at least 0, and 0 for a single question. With `floored` the variance of seeds' means is
    at least the part that is due to noise of the answers, because the means of a few seeds may agree by luck.
    """
    values = np.asarray(values_S_Q, float)
    seeds, questions = values.shape
    between = float(values.mean(1).var(ddof=1))
    if questions == 1:
        return between, 0.0
    rest_S_Q = values - values.mean(1)[:, None] - values.mean(0) + values.mean()
    rest = float((rest_S_Q**2).sum() / ((seeds - 1) * (questions - 1)))  # of neither seed nor question
    of_questions = max(0.0, float(values.mean(0).var(ddof=1) - rest / seeds))
    return max(between, rest / questions) if floored else between, of_questions


def jackknife(without_S: np.ndarray) -> float:
    """Return the variance of seeds' means by the jackknife, for seeds that may depend on each other.

    `without_S` has for each seed the mean measured without it. For independent seeds the result is the
    first of `variance_components`.
    """
    return (len(without_S) - 1) ** 2 * float(without_S.var(ddof=1))


def half_width(variances: tuple[float, float], seeds: int, questions: int, level: float) -> float:
    """Return half the width of the interval of `over_seeds`; `variances` come from `variance_components`."""
    squares = np.array(variances) / [seeds, questions]
    quantiles = stats.t.ppf(0.5 + level / 2, [seeds - 1, max(questions - 1, 1)])
    return float(np.sqrt((quantiles**2 * squares).sum()))


def mean_of_arm(values_S_Q: pd.DataFrame, bounds: tuple[float, float]) -> Interval:
    """Return (mean, low, high) of values[seeds, questions]: the mean with its 95% interval, cut to `bounds`.

    Questions that some seed lacks are ignored. For a single seed low and high are nan; without any value all three are.
    """
    values = values_S_Q.dropna(how="all").dropna(axis=1).to_numpy()
    if not values.size:
        return math.nan, math.nan, math.nan
    return clip_interval(over_seeds(values), *bounds) if len(values) > 1 else (float(values.mean()), math.nan, math.nan)


def clip_interval(interval: Interval, low: float, high: float) -> Interval:
    """Cut an interval to low..high, the possible range of its mean.

    Student's t on few seeds reaches far beyond this range.
    """
    return interval[0], max(interval[1], float(low)), min(interval[2], float(high))


def band_over_seeds(values_S_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (mean, low, high) [T] of values[seeds, T], by Student's t over seeds; all three are equal for one seed."""
    values = np.asarray(values_S_T, float)
    mean, seeds = values.mean(0), len(values)
    if seeds == 1:
        return mean, mean, mean
    half = stats.t.ppf(0.975, seeds - 1) * values.std(0, ddof=1) / np.sqrt(seeds)
    return mean, mean - half, mean + half


def p_above(mean: float, variances: tuple[float, float], seeds: int, questions: int, null: float = 0.0) -> float:
    """Return the one-sided p-value of the hypothesis that the mean over seeds and questions is at most `null`.

    The p-value is below 0.025 exactly if the 95% interval by `variances` (see `variance_components`) is above `null`.
    If nothing varies, it is the p-value of a sign test. For a mean of minus infinity (no lower bound) it is 1.
    """
    gap = mean - null
    if gap == -np.inf:
        return 1.0
    if max(variances) < 1e-20:
        return 2.0**-seeds if gap > 0 else 1.0
    if questions == 1:
        return float(stats.t.sf(gap / np.sqrt(variances[0] / seeds), seeds - 1))

    def interval_at(level: float) -> Interval:
        half = half_width(variances, seeds, questions, level)
        return gap, gap - half, gap + half

    two_sided = p_value(interval_at, 64)  # 64: variances above 0 give an interval a width
    return two_sided / 2 if gap > 0 else 1 - two_sided / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm (1979), so that each can be compared with the level of the whole family."""
    order, adjusted, largest = np.argsort(p_values), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def fewest_seeds(decide: Callable[[int], bool], least: int) -> int | None:
    """Return the smallest number of seeds n, `least` to `MOST_SEEDS`, for which `decide(n)` is true, or None.

    `decide` must remain true above the first such n, since the search is by bisection.
    """
    numbers = range(least, MOST_SEEDS + 1)
    index = bisect_left(numbers, True, key=decide)
    return numbers[index] if index < len(numbers) else None


def correlation(x: pd.Series, y: pd.Series, means: int) -> Interval:
    """Return Pearson's correlation of `x` and `y` with its 95% interval by Fisher's z.

    `x` and `y` have the same length, and neither is constant. `means` is 1, or the number of groups if the caller has
    subtracted each group's mean: the interval is wider then, since each mean takes a degree of freedom. If no degree of
    freedom is left, the interval is -1 to 1.
    """
    coefficient, free = float(stats.pearsonr(x, y).statistic), len(x) - means - 2
    if free < 1:
        return coefficient, -1.0, 1.0
    with np.errstate(divide="ignore"):  # of a correlation of 1
        center = np.arctanh(coefficient)
    half = stats.norm.ppf(0.975) / np.sqrt(free)
    return coefficient, float(np.tanh(center - half)), float(np.tanh(center + half))


def share_interval(values_Q: np.ndarray, samples: int) -> Interval:
    """Return the mean of shares in [0, 1] with its 95% interval; each share is one question's mean over `samples`.

    This is Wilson's score interval (1927). Its number of draws is the effective number: m (1 - m) divided by the
    squared standard error of the mean m over questions, but at most the number of answers. Raises ValueError for no
    question, and for a share outside 0 to 1.
    """
    values = np.asarray(values_Q, float)
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("an interval of a share needs a value in [0, 1] for each of one question or more")
    mean, error_square = values.mean(), values.var() / len(values)
    most, spread = len(values) * samples, mean * (1 - mean)
    draws: float = most
    if spread <= 0:  # all right or all wrong: a question counts once
        draws = len(values)
    elif error_square * most > spread:
        draws = spread / error_square
    z = stats.norm.ppf(0.975)
    center = (mean + z**2 / (2 * draws)) / (1 + z**2 / draws)
    half = z / (1 + z**2 / draws) * np.sqrt(spread / draws + z**2 / (4 * draws**2))
    return float(mean), max(0.0, float(center - half)), min(1.0, float(center + half))


def p_value(interval: Callable[[float], Interval], pairs: int) -> float:
    """Return the two-sided p-value of an interval: 1 minus the level at which an end of `interval(level)` is 0.

    For an interval without width it is 2 / 2**pairs, the p-value of a sign test on `pairs` equal differences, since
    Student's t would give 0. Else it is at least 1e-15, the resolution of `1 - p`.
    """

    def gap_to_zero(p: float) -> float:
        """Return how far the interval at level 1 - p lies from 0; negative if the interval contains 0."""
        mean, low, high = interval(1 - p)
        return abs(mean) - (high - low) / 2

    mean, low, high = interval(0.95)
    if mean == 0:
        return 1.0
    least = 1e-15
    if high - low <= NO_WIDTH:
        return max(2.0 ** (1 - pairs), least)
    return least if gap_to_zero(least) > 0 else float(optimize.brentq(gap_to_zero, least, 1.0, xtol=1e-15))


def pass_at(k: int, right: Sequence[int] | np.ndarray, samples: int) -> np.ndarray:
    """Compute pass@k of questions from the numbers `right` of right samples, each out of `samples`.

    `right` may have any shape; the result has the same. This is the unbiased estimator of Chen et al. 2021 (arXiv
    2107.03374, Eq. 1) for c right of n samples: 1 - C(n - c, k) / C(n, k), which is one minus the product of 1 - k / i
    over i from n - c + 1 to n. Raises ValueError for k outside 1 to `samples`, and for impossible counts.
    """
    right = np.asarray(right)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples; allowed: pass@1 to pass@{samples}")
    if ((right < 0) | (right > samples)).any():
        raise ValueError(f"{right} right of {samples} samples; allowed: 0 to {samples}")
    misses = np.concatenate([[1.0], np.cumprod([1 - k / max(k, samples - c + 1) for c in range(1, samples + 1)])])
    return 1 - misses[right]


def values_of_k(samples: int) -> list[int]:
    """Return the k for which to report pass@k: 1, 2, 4 ... and `samples` itself."""
    powers = [2**n for n in range(samples.bit_length()) if 2**n < samples]
    return [*powers, samples]
