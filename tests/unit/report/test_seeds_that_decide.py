"""The number of seeds that would decide an open contrast, checked by simulated repetitions of the measurement."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from qerl_lab.report.claims import Claim
from qerl_lab.report.effects import Numbers
from qerl_lab.report.stats import half_width, variance_components
from qerl_lab.report.verdicts import PValues, Row, Verdict, p_values, set_verdicts
from simulated_runs import EQUAL, GRADED, SCALAR, arms, held_out_arms, verdicts


def repeated(numbers: Numbers, values_S_Q: np.ndarray, claim: Claim, seeds: int) -> Numbers:
    """Return the numbers as if these values had been measured, with p-values from the variances of these values."""
    of_values = replace(
        numbers, at_least=values_S_Q, at_most=values_S_Q, questions=values_S_Q.shape[1],
        variances=variance_components(values_S_Q, floored=True), seeds=seeds,
    )  # fmt: skip
    return replace(of_values, p=p_values(of_values, claim))


def share_decided(rows: list[Row], seeds: int, repeats: int = 300) -> float:
    """Return the share of draws of `seeds` seeds, with the measured effect and spread, that decide the first row."""
    first, draw, found = rows[0], np.random.default_rng(0), 0
    numbers = first.numbers
    between, of_questions = numbers.variances
    rest = numbers.at_least - numbers.at_least.mean(1)[:, None] - numbers.at_least.mean(0) + numbers.at_least.mean()
    spread = float(rest.std()) * math.sqrt(numbers.seeds / (numbers.seeds - 1))
    of_seeds = max(0.0, between - spread**2 / numbers.questions)
    for _ in range(repeats):
        values = numbers.at_least.mean() + draw.normal(0, math.sqrt(of_seeds), (seeds, 1))
        values = values + draw.normal(0, math.sqrt(of_questions), numbers.questions)
        values = values + draw.normal(0, spread, (seeds, numbers.questions))
        drawn = repeated(numbers, values, first.claim, seeds)
        found += set_verdicts([replace(first, numbers=drawn), *rows[1:]])[0].verdict != Verdict.UNDECIDED
    return found / repeats


def open_scalar() -> list[Row]:
    """Return three open contrasts."""
    return verdicts(SCALAR, arms(SCALAR, {"nvfp4": 0.02, "mxfp4": 0.02}, 5, 0.02, np.random.default_rng(4)))


def open_beside_decided() -> list[Row]:
    """Return an open contrast and two decided ones, which leave it the level of a single contrast."""
    rows = verdicts(SCALAR, arms(SCALAR, {}, 5, 0.02, np.random.default_rng(0)))
    small = [replace(row, numbers=replace(row.numbers, p=PValues(1.0, 1e-6, 1.0))) for row in rows[1:]]
    return set_verdicts([rows[0], *small])


def open_graded() -> list[Row]:
    return verdicts(GRADED, held_out_arms(GRADED, 0.03, 5, np.random.default_rng(0)))


def open_by_luck() -> list[Row]:
    """Return a contrast of three seeds with means that agree by luck. Means of more seeds will not agree."""
    claim = replace(GRADED, smallest=0.02)
    (row,) = verdicts(claim, held_out_arms(claim, 0.01, 3, np.random.default_rng(0)))
    values = row.numbers.at_least
    lucky = values - 0.8 * (values.mean(1)[:, None] - values.mean())
    return [measured_as(row, lucky - lucky.mean() + 0.018)]


def open_equal() -> list[Row]:
    return verdicts(EQUAL, arms(EQUAL, {}, 5, 0.02, np.random.default_rng(3)))


def seeds_as_measured(row: Row) -> int:
    """Return the number of seeds that decide the row if the effect is as measured, as the row's text says."""
    return int(re.match(r"about (\d+) seeds would .* if the effect is as measured", row.why)[1])


@pytest.mark.slow
@pytest.mark.parametrize("made", [open_scalar, open_beside_decided, open_graded, open_by_luck, open_equal])
def test_the_number_of_seeds_asked_for_decides_half_of_the_simulated_repetitions(made: Callable[[], list[Row]]) -> None:
    rows = made()
    seeds = seeds_as_measured(rows[0])
    assert share_decided(rows, seeds // 2) < 0.4 < 0.45 < share_decided(rows, seeds)  # 0.5 less 2 standard errors
    assert share_decided(rows, 2 * seeds) >= 0.75  # 0.8 less 2 standard errors


def test_the_number_of_seeds_asked_for_is_the_smallest_that_decides() -> None:
    row = (rows := open_scalar())[0]
    seeds = seeds_as_measured(row)
    mean, sd = float(row.numbers.at_least.mean()), math.sqrt(row.numbers.variances[0])
    for count, is_enough in ((seeds - 1, False), (seeds, True)):  # exactly this mean and spread
        values = np.array([(-1) ** n for n in range(count)], float)
        values = mean + sd * (values - values.mean()) / values.std(ddof=1)
        same = replace(row, numbers=repeated(row.numbers, values[:, None], SCALAR, count))
        assert (set_verdicts([same, *rows[1:]])[0].verdict != Verdict.UNDECIDED) == is_enough


def test_the_larger_number_of_seeds_decides_whatever_the_effect_is() -> None:
    """That number is enough even for an effect halfway between the borders."""
    row = verdicts(SCALAR, arms(SCALAR, {"nvfp4": 0.02}, 5, 0.02, np.random.default_rng(9)))[0]
    most = int(re.search(r" if the effect is as measured, (\d+) decide whatever it is$", row.why)[1])
    variances, level = row.numbers.variances, 1 - 2 * 0.025 / 3  # three contrasts
    assert 2 * half_width(variances, most, 1, level) <= 0.02 < 2 * half_width(variances, most - 1, 1, level)
    halfway = replace(row.numbers, at_least=row.numbers.at_least - row.numbers.at_least.mean() + 0.01)
    assert seeds_as_measured(set_verdicts([replace(row, numbers=halfway)])[0]) <= most


def measured_as(row: Row, values_S_Q: np.ndarray) -> Row:
    """Return the row as if these values had been measured."""
    numbers = repeated(row.numbers, values_S_Q, row.claim, len(values_S_Q))
    return set_verdicts([replace(row, numbers=numbers)])[0]


def test_a_row_that_seeds_cannot_decide_says_why_and_what_would_help() -> None:
    row, rng = open_scalar()[0], np.random.default_rng(2)
    near = "the measured effect is so near a border that not even 1,000 seeds would decide it"
    spread = rng.normal(size=(5, 1))
    wide = measured_as(row, spread - spread.mean() + 0.01)
    assert (wide.verdict, wide.why) == (Verdict.UNDECIDED, near)
    of_seven = measured_as(row, rng.normal(size=(1, 7)) + rng.normal(0, 0.01, size=(5, 7)))
    assert of_seven.why == f"{near} with 7 questions: ask more, by a larger eval.questions or held-out set"
    (same, *_) = open_equal()
    edge = measured_as(same, 0.005 * (spread - spread.mean()) + 0.02)  # the largest effect that counts as no difference
    assert edge.why == near
