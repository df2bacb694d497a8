"""Intervals, and the p-values that go with them."""

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from scipy import optimize, stats

Interval = tuple[float, float, float]  # mean, low, high
SHARE, NATS = (0.0, 1.0), (0.0, math.inf)  # what fractions and entropies can be


ALIKE = "[all alike]"
NO_WIDTH = 1e-12  # a spread below is one of rounding
MOST_SEEDS = 1000  # more are not asked for


def between(low: float, high: float, spelled: Callable[[float], str] = "{:+.3f}".format) -> str:
    """Spell an interval, `[-0.010, +0.250]`, and one without a width `[all alike]`.

    Where no seed and no question differs from another nothing tells how far others would: that is no interval.
    """
    return f"[{spelled(low)}, {spelled(high)}]" if high - low > NO_WIDTH else ALIKE


def paired_interval(before: pd.Series, after: pd.Series, level: float = 0.95) -> Interval:
    """The per-question difference `after - before` of one run, by Student's t over questions.

    Paired, because the same questions are asked twice and their difficulty cancels (Miller, arXiv 2411.00640). Both are
    indexed by question id; raises ValueError where they do not hold the same questions, or fewer than two. It says
    nothing of another seed: that is `crossed_interval`.
    """
    if set(before.index) != set(after.index) or len(before) < 2:
        raise ValueError("a paired interval needs the same questions before and after, two at least")
    difference = (after - before.reindex(after.index)).to_numpy(float)
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half = stats.t.ppf(0.5 + level / 2, len(difference) - 1) * error
    return float(mean), float(mean - half), float(mean + half)


def crossed_interval(values_S_Q: np.ndarray, level: float = 0.95) -> Interval:
    """The mean of values[seeds, questions] where both are draws: other seeds, other questions of their kind.

    Two-way random effects, value = mean + seed + question + rest. The half width is the root of the sum of squares of
    Student's t over the seeds' means, which holds seed and rest, and of t times the standard error that the questions
    add, which all seeds share: their variance component by the analysis of variance, 0 at least.

    Of simulated intervals of 95% it covered 0.950 to 0.982 with 2 seeds, to 0.977 with 3, to 0.968 with 5 and to 0.957
    with 10, whatever varied most (256 questions). A bootstrap over seeds and questions covered from 0.57, 0.73, 0.85
    and 0.91, because it cannot draw a seed that it has not seen; Student's t over the seeds alone, which takes the
    questions for all there are, from 0.73, 0.40, 0.23 and 0.14.

    Raises ValueError for fewer than two seeds or questions, and for a value that is missing.
    """
    values = np.asarray(values_S_Q, float)
    if values.ndim != 2 or min(values.shape) < 2 or not np.isfinite(values).all():
        raise ValueError("an interval over seeds and questions needs two of each at least, and every value")
    mean, half = values.mean(), half_width(components(values), len(values), values.shape[1], level)
    return float(mean), float(mean - half), float(mean + half)


def components(values_S_Q: np.ndarray) -> tuple[float, float]:
    """The variances of values[seeds, questions] between seeds' means, and of questions themselves (0 at least).

    By the analysis of variance, as `crossed_interval` says; of one column that of its seeds, and 0.
    """
    values = np.asarray(values_S_Q, float)
    between, rest = float(values.mean(1).var(ddof=1)), _rest(values)
    if values.shape[1] == 1:
        return between, 0.0
    return between, max(0.0, float(values.mean(0).var(ddof=1) - rest / len(values)))


def floored_components(values_S_Q: np.ndarray) -> tuple[float, float]:
    """`components`, but the first no smaller than the noise of answers, which seeds do not share, adds to a mean.

    A few seeds may agree by luck in their means, although their answers to each question do not. Verdicts and the
    seeds that would decide both go by it.
    """
    between, of_questions = components(values_S_Q)
    return max(between, _rest(np.asarray(values_S_Q, float)) / np.shape(values_S_Q)[1]), of_questions


def moderated(own: float, family: Sequence[float]) -> float:
    """A contrast's variance beside those of its family, its own among them: no smaller than their median.

    With few seeds a contrast's own variance may be small by luck, and its p-value with it. It is never made smaller
    than it is, so that no verdict says more than the contrast's own interval. The median, because one noisy arm says
    nothing of the others.

    Of simulated intervals of 95% over 5 seeds, three contrasts with one control, 0.98 covered where all variances are
    equal, and 0.93 of those in the lowest fifth by their own variance (by Student's t 0.95 and 0.80). Where one arm's
    standard deviation is three to ten times another's, 0.95 or more covered.
    """
    return max(own, float(np.median(family)))


def _rest(values_S_Q: np.ndarray) -> float:
    """The variance of what neither the seed nor the question explains; 0 of one question."""
    seeds, questions = values_S_Q.shape
    if questions == 1:
        return 0.0
    rest = values_S_Q - values_S_Q.mean(1)[:, None] - values_S_Q.mean(0) + values_S_Q.mean()
    return float((rest**2).sum() / ((seeds - 1) * (questions - 1)))


def half_width(variances: tuple[float, float], seeds: int, questions: int, level: float) -> float:
    """Half the interval of `crossed_interval` at so many seeds and questions, from `components`."""
    squares = np.array(variances) / [seeds, questions]
    quantiles = stats.t.ppf(0.5 + level / 2, [seeds - 1, max(questions - 1, 1)])
    return float(np.sqrt((quantiles**2 * squares).sum()))


def over_seeds(values_S_Q: np.ndarray) -> Interval:
    """The interval of 95% of values[seeds, questions]: `crossed_interval`, and of one column Student's t over seeds.

    Raises ValueError for fewer than two seeds, and for a value that is missing.
    """
    values = np.asarray(values_S_Q, float)
    if values.ndim == 2 and values.shape[1] == 1 and len(values) > 1 and np.isfinite(values).all():
        mean, half = values.mean(), half_width(components(values), len(values), 1, 0.95)
        return float(mean), float(mean - half), float(mean + half)
    return crossed_interval(values)


def within(interval: Interval, low: float, high: float) -> Interval:
    """Cut an interval at the least and the most that its mean can be, 0 and 1 of fractions.

    It covers as often as before: nothing that the mean can be is cut off. Of few seeds Student's t goes far beyond.
    """
    return interval[0], max(interval[1], float(low)), min(interval[2], float(high))


def band_over_seeds(values_S_T: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`over_seeds` of each of the columns T on its own: means, lows and highs [T]. Of one seed all are its values."""
    values = np.asarray(values_S_T, float)
    mean, seeds = values.mean(0), len(values)
    if seeds == 1:
        return mean, mean, mean
    half = stats.t.ppf(0.975, seeds - 1) * values.std(0, ddof=1) / np.sqrt(seeds)
    return mean, mean - half, mean + half


def p_above(mean: float, variances: tuple[float, float], seeds: int, questions: int, null: float = 0.0) -> float:
    """The one-sided p-value of the hypothesis that the mean over seeds and questions is at most `null`.

    It is below 0.025 where the interval of 95% by these variances lies above `null`. Where nothing varies there is no
    variance to go by: then it is that of the seeds' signs, 2**-seeds. A mean of minus infinity, of which nothing is
    known from below, has 1.
    """
    gap = mean - null
    if gap == -np.inf:
        return 1.0
    if max(variances) < 1e-20:
        return 2.0**-seeds if gap > 0 else 1.0
    if questions == 1:
        return float(stats.t.sf(gap / np.sqrt(variances[0] / seeds), seeds - 1))

    def interval(level: float) -> Interval:
        half = half_width(variances, seeds, questions, level)
        return gap, gap - half, gap + half

    two_sided = p_value(interval, 64)
    return two_sided / 2 if gap > 0 else 1 - two_sided / 2


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment (1979): p-values that may each be held against the level of their whole family."""
    order, adjusted, largest = np.argsort(p_values), [1.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def effect_size(differences_S: np.ndarray) -> float:
    """The mean over the standard deviation of the seeds' differences; nan where they differ by rounding or not."""
    spread = float(np.std(differences_S, ddof=1)) if len(differences_S) > 1 else 0.0
    return float(np.mean(differences_S)) / spread if spread > NO_WIDTH else np.nan


def probability_of_improvement(treated_S: np.ndarray, control_S: np.ndarray) -> float:
    """The share of pairs of seeds in which the treated value is larger, ties half (arXiv 2108.13264)."""
    difference = np.asarray(treated_S, float)[:, None] - np.asarray(control_S, float)[None]
    return float(((difference > 0) + 0.5 * (difference == 0)).mean())


def fewest_seeds(decide: Callable[[int], bool], least: int) -> int | None:
    """The smallest number from `least` on that is enough, as all larger ones are; None where `MOST_SEEDS` are not."""
    numbers = range(least, MOST_SEEDS + 1)
    index = bisect_left(numbers, True, key=decide)
    return numbers[index] if index < len(numbers) else None


def share_interval(values_Q: np.ndarray, samples: int) -> Interval:
    """The mean of shares in [0, 1], one a question and each of `samples` draws, where questions are draws too.

    Wilson's score interval (1927) at the effective number of draws: m (1 - m) over the squared standard error of the
    mean m over the questions, between the number of questions and that of all draws. With one sample a question that
    is Wilson's own interval. It has a width where all are right or wrong, and never leaves [0, 1].

    Of simulated intervals of 95% it covered 0.94 to 0.96 with 256 questions or more and 1, 4 or 16 samples,
    whatever their difficulty, and 0.92 to 0.98 with 30 questions.

    Raises ValueError for no question, and for a value outside of [0, 1].
    """
    values = np.asarray(values_Q, float)
    if not len(values) or not ((values >= 0) & (values <= 1)).all():
        raise ValueError("an interval of a share needs a value in [0, 1] for each of one question or more")
    mean, error_square = values.mean(), values.var() / len(values)
    most, spread = len(values) * samples, mean * (1 - mean)
    draws = most if error_square * most <= spread else spread / error_square
    draws = draws if spread > 0 else len(values)  # all right or all wrong: draws of one question may be one draw again
    z = stats.norm.ppf(0.975)
    center = (mean + z**2 / (2 * draws)) / (1 + z**2 / draws)
    half = z / (1 + z**2 / draws) * np.sqrt(spread / draws + z**2 / (4 * draws**2))
    return float(mean), max(0.0, float(center - half)), min(1.0, float(center + half))


def p_value(interval: Callable[[float], Interval], pairs: int) -> float:
    """The two-sided p-value that goes with an interval: 1 minus the level at which `interval(level)` reaches 0.

    So it is below 0.05 where the interval of 95% leaves 0 out, and for `paired_interval` that of the paired t-test. It
    is at least 2 / 2**pairs, the least that the signs of `pairs` differences could give: Student's t would say 0 where
    all are equal. And at least 1e-15, since a level nearer to 1 is 1.
    """

    def leaves_out(p: float) -> float:
        mean, low, high = interval(1 - p)
        return abs(mean) - (high - low) / 2

    least = max(2.0 ** (1 - pairs), 1e-15)
    if interval(0.5)[0] == 0 or least >= 1:
        return 1.0
    return least if leaves_out(least) > 0 else float(optimize.brentq(leaves_out, least, 1.0, xtol=1e-15))
