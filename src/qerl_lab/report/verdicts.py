"""Reach verdicts on claims, with the numbers behind them. Pure.

The effect of a contrast is the measure in the treated arm minus the measure in the control arm, paired by seed (and
question), in logarithms for a ratio. The sign is chosen so that the claim predicts a positive effect. Three one-sided
tests at `LEVEL` decide: the effect is above 0, below the smallest effect that matters, below 0. Each test is corrected
by Holm over the contrasts of its family (`Claim.family`) that have enough seeds, and uses a variance moderated by the
family.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from qerl_lab.report import stats
from qerl_lab.report.arms import keys_implied_by_task, number_first
from qerl_lab.report.claims import Claim, Contrast, of_paper
from qerl_lab.report.comparison import CONDITIONS
from qerl_lab.report.effects import BROKEN, OPEN, NoRuns, Numbers, Pair, PValues, find_pairs, measure_pair
from qerl_lab.report.measures import Unmeasured, has_collapsed
from qerl_lab.report.runs import Run

LEVEL = 0.025  # of each one-sided test, which matches a 95% interval


class Verdict(StrEnum):
    """What the tests of a contrast showed. `PHRASES` says what each verdict means."""

    SUPPORTED = "supported"
    TOO_SMALL = "too small to matter"
    EXCLUDED = "excluded"
    REVERSED = "reversed"
    UNDECIDED = "undecided"


class Phrase(NamedTuple):
    """What a verdict says (`shown`), and what more seeds would do to reach it (`would`)."""

    shown: str
    would: str


# `EITHER_WAY` is for claims of no difference.
PHRASES = {
    Verdict.SUPPORTED: Phrase("the effect is there", "support it"),
    Verdict.TOO_SMALL: Phrase("the effect is there, and below {size}", "show it to be there and below {size}"),
    Verdict.EXCLUDED: Phrase("an effect of {size} or more is excluded", "exclude {size} or more"),
    Verdict.REVERSED: Phrase("the effect has the other sign", "show the other sign"),
}
EITHER_WAY = PHRASES | {
    Verdict.SUPPORTED: Phrase("within {size} either way", "support it"),
    Verdict.EXCLUDED: Phrase("the difference is larger than {size}", "show a difference larger than {size}"),
}


@dataclass(frozen=True)
class Row:
    """The verdict on one contrast of a claim, for one pair of arms.

    `context` holds the settings that tell the row from others on this contrast, `conditions` the values of
    `CONDITIONS`. `registered` says how many runs record the claims file, `is_registered` whether all do. `finished`,
    `started` and `collapsed` count runs of (treated, control); `collapsed` stays 0 unless the measure is
    `answers_last`. `lacks_runs` tells that an arm of the contrast has no run, neither finished nor started.
    """

    claim: Claim
    contrast: Contrast
    verdict: Verdict
    why: str
    context: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()
    registered: str = ""
    is_registered: bool = False
    finished: tuple[int, int] = (0, 0)
    started: tuple[int, int] = (0, 0)
    collapsed: tuple[int, int] = (0, 0)
    numbers: Numbers | None = None
    lacks_runs: bool = False

    @property
    def judged(self) -> Numbers | None:
        """Return `numbers` if they have enough seeds for a verdict on the claim, else None."""
        return self.numbers if self.numbers and self.numbers.seeds >= self.claim.file.seeds else None


def judge(counted: Sequence[Run], runs: Sequence[Run], claims: Sequence[Claim] | None = None) -> list[Row]:
    """Reach a verdict on each contrast of the claims (None: the paper's); return a row per pair of arms that tests it.

    A contrast without such a pair has one row, with the reason in `why`. `counted` holds the newest finished run of
    each arm and seed, which give the numbers. Unfinished runs in `runs` only add to the number of started runs.
    """
    rows: list[Row] = []
    started = [*counted, *(run for run in runs if not run.is_finished)]
    for claim in of_paper() if claims is None else claims:
        for contrast in claim.contrasts:
            empty = Row(claim, contrast, Verdict.UNDECIDED, "")
            try:
                rows_of_contrast = [_measure_row(empty, pair) for pair in find_pairs(claim, contrast, started)]
            except Unmeasured as error:
                rows_of_contrast = [replace(empty, why=str(error), lacks_runs=isinstance(error, NoRuns))]
            common = set.intersection(*(set(row.context) for row in rows_of_contrast))
            implied = keys_implied_by_task([dict(row.context) for row in rows_of_contrast])
            for row in rows_of_contrast:  # name the settings that tell the rows of a contrast apart
                context = (item for item in row.context if item not in common and item[0] not in implied)
                rows.append(replace(row, context=tuple(context)))
    return set_verdicts(floor_variances(rows))


def _measure_row(row: Row, pair: Pair) -> Row:
    """Complete `row` for a pair of arms: settings, conditions, counts of runs, and numbers.

    If the pair cannot be measured, `why` has the reason in place of the numbers.
    """
    claim, sides = row.claim, (pair.treated, pair.control)
    treated, control = (dict(side.runs[0].arm) for side in sides)
    free = treated.keys() - dict(pair.context).keys() - {claim.swept_key}  # keys in which the sides may differ
    context = dict(pair.context) | {key: f"{treated[key]} / {control.get(key)}" for key in free}
    runs, conditions = [run for side in sides for run in side.runs], []
    for key in CONDITIONS:
        values = sorted({run.value(key) for run in runs if key in run.settings}, key=number_first)
        how = ""
        if key == claim.best_of:
            how = "each arm's best of "
        elif key == claim.mean_over:
            how = "mean over "
        if values:
            conditions.append((key, how + ", ".join(values)))
    holding = sum(run.origin.claims_sha256 == claim.file.sha256 for run in runs)
    is_registered = holding == len(runs)
    registered = f"preregistered: all {holding} runs record this file's hash"
    if not is_registered:
        later = f"; the claim was added on {claim.added}" if claim.added else ""
        registered = f"not preregistered: {holding} of {len(runs)} runs record this file's hash{later}"
    row = replace(
        row, context=tuple(sorted(context.items())), conditions=tuple(conditions), registered=registered,
        is_registered=is_registered, finished=(len(pair.treated.runs), len(pair.control.runs)),
        started=(sum(map(len, pair.treated.started.values())), sum(map(len, pair.control.started.values()))),
    )  # fmt: skip
    try:
        row = replace(row, numbers=measure_pair(claim, pair))
    except Unmeasured as error:
        return replace(row, why=str(error))
    if claim.measure == "answers_last":  # its mean alone does not show how many runs fell
        fell = [sum(map(has_collapsed, side.runs)) for side in sides]
        row = replace(row, collapsed=(fell[0], fell[1]))
    return row


def floor_variances(rows: Sequence[Row]) -> list[Row]:
    """Raise small variances between seeds, and compute uncorrected p-values by them, in rows with enough seeds.

    A variance from few seeds may be small by luck. So the variance of each contrast becomes at least the median over
    the contrasts of the same family and measure, and at least the jackknife variance of the contrast. Contrasts with
    censored seeds neither enter the median nor are raised to it, because their variances describe bounds.
    """
    family: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.judged and not row.judged.censored:
            family.setdefault((row.claim.family, row.claim.measure), []).append(row.judged.variances[0])
    floored = []
    for row in rows:
        if numbers := row.judged:
            of_seeds, of_questions = max(numbers.variances[0], numbers.jackknife), numbers.variances[1]
            if not numbers.censored:
                of_seeds = max(of_seeds, float(np.median(family[row.claim.family, row.claim.measure])))
            numbers = replace(numbers, variances=(of_seeds, of_questions))
            row = replace(row, numbers=replace(numbers, p=p_values(numbers, row.claim)))
        floored.append(row)
    return floored


def p_values(numbers: Numbers, claim: Claim, seeds: int | None = None) -> PValues:
    """Compute the uncorrected p-values of a contrast; `seeds` replaces its number of seeds, all else equal.

    For a claim of no difference (direction 0) the tests are of equivalence: `above` is the larger p-value of two
    one-sided tests that the difference is within the margin. `small` is twice the smaller p-value of two tests that it
    is outside, because either side could show it. `below` is 1.
    """
    low, high = float(numbers.at_least.mean()), float(numbers.at_most.mean())

    def p_above(mean: float, null: float) -> float:
        """Return the p-value of the hypothesis that the effect is at most `null`, if it is measured as `mean`."""
        return stats.p_above(mean, numbers.variances, seeds or numbers.seeds, numbers.questions, null)

    if claim.direction:
        return PValues(p_above(low, 0.0), p_above(-high, -claim.margin), p_above(-high, 0.0))
    inside = max(p_above(low, -claim.margin), p_above(-high, -claim.margin))
    outside = min(p_above(low, claim.margin), p_above(-high, claim.margin))
    return PValues(inside, min(1.0, 2 * outside), 1.0)


def family_sizes(rows: Sequence[Row]) -> dict[str, int]:
    """Map each family to its number of judged contrasts (`Row.judged`), for which p-values are corrected."""
    return dict(Counter(row.claim.family for row in rows if row.judged))


def set_verdicts(rows: Sequence[Row]) -> list[Row]:
    """Correct p-values within families, and set the verdict of each row with enough seeds; others stay undecided."""
    decided = []
    for row in rows:
        others = [other.judged.p for other in rows
                  if other.judged and other is not row and other.claim.family == row.claim.family]  # fmt: skip
        if numbers := row.judged:
            adjusted, verdict = _correct_and_test(row.claim, numbers.p, others)
            numbers = replace(numbers, adjusted=adjusted)
            if verdict == Verdict.UNDECIDED:
                why = _explain_undecided(row, numbers, others)
            else:
                why = [_phrase_of(verdict, row.claim).shown, *_reservations(row, numbers, verdict)]
            row = replace(row, numbers=numbers, verdict=verdict, why="; ".join(why))
        elif row.numbers:
            row = replace(row, why=f"{row.numbers.seeds} of {row.claim.file.seeds} seeds: an interval, no verdict yet")
        decided.append(row)
    return decided


def _correct_and_test(claim: Claim, p: PValues, others: Sequence[PValues]) -> tuple[PValues, Verdict]:
    """Correct the p-values of a contrast for the other contrasts of its family, and find the verdict.

    `p` has the uncorrected p-values of the contrast, `others` of each other contrast. Returns the p-values corrected by
    Holm's method, and the verdict at `LEVEL`.
    """
    adjusted = PValues(*(stats.holm([own, *rest])[0] for own, *rest in zip(p, *others, strict=True)))
    is_above, is_small, is_below = (value < LEVEL for value in adjusted)
    if is_below:
        return adjusted, Verdict.REVERSED
    if is_above and is_small and claim.direction:  # else `is_small` means outside of the margin
        return adjusted, Verdict.TOO_SMALL
    if is_above:
        return adjusted, Verdict.SUPPORTED
    return adjusted, Verdict.EXCLUDED if is_small else Verdict.UNDECIDED


def _explain_undecided(row: Row, numbers: Numbers, others: Sequence[PValues]) -> list[str]:
    """Estimate the seeds that would decide a row, and what they would decide; list this and what limits a verdict.

    `others` holds the uncorrected p-values of the other contrasts in the family.
    """
    claim = row.claim

    def verdict_at(seeds: int) -> Verdict:
        """Return the verdict at `seeds` seeds if effect, spread and the other contrasts stay as measured."""
        return _correct_and_test(claim, p_values(numbers, claim, seeds), others)[1]

    def is_narrow_at(seeds: int) -> bool:
        """Tell whether the interval at Holm's strictest level is too narrow to hold both 0 and the smallest effect."""
        level = 1 - 2 * LEVEL / (1 + len(others))
        return 2 * stats.half_width(numbers.variances, seeds, numbers.questions, level) <= claim.margin

    as_measured = stats.fewest_seeds(lambda seeds: verdict_at(seeds) != Verdict.UNDECIDED, numbers.seeds + 1)
    any_effect = None
    if claim.direction and not numbers.censored:  # without a direction there is a border on each side
        any_effect = stats.fewest_seeds(is_narrow_at, claim.file.seeds)
    reached = verdict_at(as_measured) if as_measured else Verdict.UNDECIDED
    if as_measured:
        why = f"about {as_measured} seeds would {_phrase_of(reached, claim).would} if the effect is as measured"
        if any_effect and any_effect > as_measured:
            why += f", {any_effect} decide whatever it is"
    elif numbers.censored:
        why = "too many runs never got there to tell"
    else:
        why = f"the measured effect is so near a border that not even {stats.MOST_SEEDS:,} seeds would decide it"
        if numbers.questions > 1:
            why += f" with {numbers.questions} questions: ask more, by a larger eval.questions or held-out set"
    return [why, *_reservations(row, numbers, reached)]


def _phrase_of(verdict: Verdict, claim: Claim) -> Phrase:
    """Return the phrase of a verdict on `claim`, with the smallest effect that matters filled in."""
    phrase = (PHRASES if claim.direction else EITHER_WAY)[verdict]
    return Phrase(*(text.format(size=claim.smallest_as_text) for text in phrase))


def _reservations(row: Row, numbers: Numbers, reached: Verdict) -> list[str]:
    """List what limits a verdict: censored seeds, a guardrail that did not hold, effects of the paper below the size.

    `reached` is the verdict, or for an undecided contrast the one that more seeds would reach.
    """
    claim, limits = row.claim, list[str]()
    if numbers.censored:
        limits.append(f"censored seeds: {numbers.censored} of {numbers.seeds}")
    if claim.guardrail and numbers.guardrail in (BROKEN, OPEN):
        state = f"broken: lower by more than {claim.guardrail.margin:g}" if numbers.guardrail == BROKEN else "open"
        limits.append(f"guardrail {claim.guardrail.measure} is {state}")
    if claim.direction and reached in (Verdict.EXCLUDED, Verdict.TOO_SMALL):
        small = []
        for where, value in row.contrast.printed:
            size = math.log(value) if claim.is_ratio else value
            if claim.direction * size < claim.margin:
                small.append(f"{claim.format_effect(value)} ({where})")
        if small:
            limits.append(
                f"this cannot contradict the paper's {', '.join(small)}, which is below {claim.smallest_as_text}"
            )
    return limits
