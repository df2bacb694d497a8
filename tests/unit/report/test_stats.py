"""Intervals and p-values: examples by hand, and how often an interval contains the truth."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, pearsonr, ttest_rel

from qerl_lab.report import stats
from qerl_lab.report.stats import (
    format_interval,
    over_seeds,
    p_value,
    paired_interval,
    share_interval,
)


def series(values: list[float], ids: str = "abcd") -> pd.Series:
    return pd.Series(values, index=list(ids))


# --- of one run


def test_paired_interval_by_hand() -> None:
    """Differences 1/2, 0, 0, 1/2: mean 1/4, deviation sqrt(1/12), error sqrt(1/48); t(0.975, 3) is 3.182446."""
    mean, low, high = paired_interval(series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75]))
    half = 3.182446 / math.sqrt(48)
    assert (mean, low, high) == pytest.approx((0.25, 0.25 - half, 0.25 + half), abs=1e-6)
    _, low, high = paired_interval(series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75]), level=0.9)
    assert (low, high) == pytest.approx((0.25 - 2.353363 / math.sqrt(48), 0.25 + 2.353363 / math.sqrt(48)), abs=1e-6)
    before, after = series([0, 0.5, 1, 0.25]), series([0.5, 0.5, 1, 0.75])
    assert paired_interval(before, after[::-1]) == pytest.approx(paired_interval(before, after))  # paired by question
    assert paired_interval(before, before + 0.25) == (0.25, 0.25, 0.25)  # equal gains have no width


@pytest.mark.parametrize("values", [np.zeros((3, 8)), np.full((2, 5), 0.1), np.full((5, 1), 1 / 3)])
def test_values_that_do_not_vary_are_shown_without_an_interval(values: np.ndarray) -> None:
    """Both ends are the mean, up to rounding: nothing says how far other seeds and questions would be."""
    _, low, high = over_seeds(values)
    assert (low, high) == pytest.approx((values[0, 0], values[0, 0]))
    assert format_interval(low, high) == "[no spread]"
    values = values.copy()
    values[0, 0] += 0.01
    assert format_interval(*over_seeds(values)[1:]).startswith("[")
    assert format_interval(-0.01, 0.25) == "[-0.010, +0.250]"
    assert format_interval(0.9, 1.25, "{:.1f}".format) == "[0.9, 1.2]"


@pytest.mark.parametrize(("interval", "given", "said"), [
    (paired_interval, (series([1, 0], "ab"), series([1, 0], "ac")), "the same questions before and after, two"),
    (paired_interval, (series([1], "a"), series([0], "a")), "two at least"),
    (over_seeds, (np.zeros((1, 8)),), "two seeds at least, and every value"),
    (over_seeds, ([[0, math.nan], [0, 0]],), "two seeds at least, and every value"),
    (share_interval, (np.array([0.5, np.nan]), 1), r"needs a value in \[0, 1\]"),
])  # fmt: skip
def test_values_that_have_no_interval_are_refused(
    interval: Callable[..., object], given: tuple[object, ...], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        interval(*given)


# --- of seeds and questions


def test_over_seeds_by_hand() -> None:
    """Seed means 0.2 and 0.4, question means 0.1, 0.3, 0.5, no residual: the variance of the questions is 0.04."""
    values = np.array([[0.0, 0.2, 0.4], [0.2, 0.4, 0.6]])
    half = math.sqrt((12.7062047 * math.sqrt(0.02 / 2)) ** 2 + 4.3026527**2 * 0.04 / 3)
    assert over_seeds(values) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-6)


def test_questions_that_differ_by_less_than_the_residual_add_nothing() -> None:
    """Question means are equal, so the interval is Student's t over the seeds alone."""
    values = np.array([[0.0, 0.4], [0.6, 0.2]])
    half = 12.7062047 * math.sqrt(0.02 / 2)
    assert over_seeds(values) == pytest.approx((0.3, 0.3 - half, 0.3 + half), abs=1e-6)


def test_answers_that_differ_give_seeds_a_variance_although_their_means_agree() -> None:
    """Seed means are 1/3, question means 1/2, 1/2, 0; the residual has variance 4 * (1/2)^2 / 2, over 3 questions."""
    values = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert stats.variance_components(values) == pytest.approx((0, 0))
    assert stats.variance_components(values, floored=True) == pytest.approx((1 / 6, 0))


def test_the_mean_of_an_arm_leaves_out_seeds_without_answers_and_stays_among_possible_values() -> None:
    values = pd.DataFrame([[math.nan, math.nan], [1.0, 0.5], [1.0, 1.0]])
    mean, low, high = over_seeds(values.to_numpy()[1:])
    assert low < 0
    assert high > 1
    assert stats.mean_of_arm(values, stats.SHARE) == (mean, 0, 1)


SHARES = {  # standard deviations over seeds, over questions, of the residual
    "as measured": (0.02, 0.3, 0.4), "seeds": (0.2, 0.1, 0.3), "questions": (0.0, 0.4, 0.1), "rest": (0.0, 0.0, 0.5),
}  # fmt: skip


@pytest.mark.parametrize("seeds", [2, 5])
@pytest.mark.parametrize("shares", SHARES)
def test_over_seeds_covers_the_truth_as_often_as_it_says(seeds: int, shares: str) -> None:
    """The interval covers the truth in at least 95% of draws, and in at most 99% (1,000 draws: +-0.014)."""
    rng, (of_seed, of_question, rest) = np.random.default_rng(0), SHARES[shares]
    covered = 0
    for _ in range(1000):
        drawn = rng.normal(0, of_seed, (seeds, 1)) + rng.normal(0, of_question, 256)
        _, low, high = over_seeds(0.3 + drawn + rng.normal(0, rest, (seeds, 256)))
        covered += low <= 0.3 <= high
    assert 0.936 <= covered / 1000 <= 0.99


# --- of a share


@pytest.mark.parametrize(("right", "of"), [(0, 5), (5, 5), (77, 100)])
def test_a_share_of_single_samples_has_wilsons_interval(right: int, of: int) -> None:
    found = binomtest(right, of).proportion_ci(method="wilson")
    values = np.repeat([1.0, 0.0], [right, of - right])
    assert share_interval(values, 1) == pytest.approx((right / of, found.low, found.high))


def test_samples_of_a_question_count_by_how_much_they_differ() -> None:
    """If questions are alike, every sample counts. If a question is always or never right, it counts as one sample."""
    alike, settled = np.full(20, 0.25), np.repeat([1.0, 0.0], [5, 15])
    found = binomtest(80, 320).proportion_ci(method="wilson")
    assert share_interval(alike, 16)[1:] == pytest.approx((found.low, found.high))
    assert share_interval(settled, 16) == share_interval(settled, 1)
    assert share_interval(np.ones(20), 16) == share_interval(np.ones(20), 1), "all right may be one draw again"


@pytest.mark.parametrize(("questions", "samples", "off"), [(30, 16, 0.035), (256, 4, 0.02)])
def test_the_interval_of_a_share_covers_the_truth_as_often_as_it_says(questions: int, samples: int, off: float) -> None:
    rng, covered = np.random.default_rng(0), 0
    for _ in range(2000):
        shares = rng.binomial(samples, rng.beta(0.5, 0.5, questions)) / samples
        _, low, high = share_interval(shares, samples)
        covered += low <= 0.5 <= high
    assert covered / 2000 == pytest.approx(0.95, abs=off)


# --- p-values


@pytest.mark.parametrize(("count", "shift"), [(4, 0.5), (4, 5.0), (200, 0.05), (200, -0.5)])
def test_the_p_value_of_pairs_equals_the_paired_t_tests(count: int, shift: float) -> None:
    rng = np.random.default_rng(count)
    before = pd.Series(rng.normal(0, 1, count))
    after = before + rng.normal(shift, 1, count)
    found = p_value(lambda level: paired_interval(before, after, level), count)
    assert found == pytest.approx(ttest_rel(before, after).pvalue, rel=1e-6)


def test_the_p_value_and_the_interval_over_seeds_and_questions_agree() -> None:
    rng, seen = np.random.default_rng(0), set()
    for _ in range(200):
        values = rng.normal(0.3, 1, (1, 40)) + rng.normal(0, 0.2, (3, 1)) + rng.normal(0, 1, (3, 40))
        _, low, high = over_seeds(values)
        found = p_value(lambda level, values=values: over_seeds(values, level), 40)
        assert (found < 0.05) == (not low <= 0 <= high)
        seen.add(found < 0.05)
    assert seen == {True, False}


def test_one_sided_p_values_of_an_effect_and_its_opposite_add_up_to_one() -> None:
    p, opposite = (stats.p_above(mean, (0.01, 0.04), seeds=4, questions=10) for mean in (0.1, -0.1))
    assert p < 0.5 < opposite
    assert p + opposite == pytest.approx(1)


def test_equal_differences_have_the_p_value_of_flipped_signs() -> None:
    """Student's t would give 0 for four questions with equal gains. Flipped signs give 1 in 8."""
    before, after = series([0, 0, 0, 0]), series([1, 1, 1, 1])
    assert p_value(lambda level: paired_interval(before, after, level), 4) == 2 / 2**4
    assert p_value(lambda level: paired_interval(before, before, level), 4) == 1
    rng = np.random.default_rng(0)
    far = pd.Series(rng.normal(5, 1, 2000))
    assert p_value(lambda level: paired_interval(0 * far, far, level), 2000) == 1e-15


@pytest.mark.parametrize(("arms", "seeds"), [(10, 2), (4, 5)])
def test_a_correlation_within_arms_covers_the_truth_as_often_as_it_says(arms: int, seeds: int) -> None:
    draw, repeats, missed = np.random.default_rng(0), 1000, 0
    for _ in range(repeats):  # no correlation
        x, y = (values - values.mean(1, keepdims=True) for values in draw.normal(size=(2, arms, seeds)))
        _, low, high = stats.correlation(pd.Series(x.ravel()), pd.Series(y.ravel()), arms)
        missed += not low <= 0 <= high
    assert missed / repeats < 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_a_correlation_over_all_runs_has_the_usual_interval() -> None:
    x, y = (pd.Series(values) for values in np.random.default_rng(0).normal(size=(2, 8)))
    usual = pearsonr(x, y).confidence_interval()
    assert stats.correlation(x, y, 1) == pytest.approx((pearsonr(x, y).statistic, *usual))
    assert stats.correlation(x, x, 1) == pytest.approx((1, 1, 1))
    assert stats.correlation(x, y, 6)[1:] == (-1, 1)  # eight runs in six arms
