"""Verdicts on the paper's claims: supported, contradicted or undecided, with the numbers behind them. Pure.

A contrast's effect is the treated arm's measure less the control's, paired by seed (and question), of a ratio in
logarithms, and turned so that the claim says that it is above 0. Two one-sided tests at `LEVEL` decide: that it is
above 0, and that it is below the smallest effect of interest. Each has Holm's correction over the measured contrasts
of its family.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import pandas as pd

from qerl_lab.report import stats
from qerl_lab.report.arms import Run, started, told_by_task
from qerl_lab.report.claims import CLAIMS, Claim, Contrast, Guardrail
from qerl_lab.report.contrasts import FEWEST_SEEDS, Missing, Pair, Side, find
from qerl_lab.report.measures import MEASURES, Unmeasured, Values
from qerl_lab.report.runs import Record

LEVEL = 0.025  # of each one-sided test: an interval of 95% leaves out what it rejects


class Verdict(StrEnum):
    SUPPORTED = "supported"
    CONTRADICTED = "contradicted"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Numbers:
    """What was measured of one contrast.

    `treated` and `control` are means with their intervals, in the measure's unit; `effect` is their paired difference,
    of a ratio the factor. `oriented` [seeds, questions] is the effect as it is tested. `p_for` and `p_against` are
    one-sided and not corrected; `adjusted` both by Holm. `effect_size` is the mean over the standard deviation of the
    seeds' differences; nan where they have none. `seeds_as_measured` and `seeds_at_any_effect` are of an open
    contrast, those of `_seeds_as_measured` and `_seeds_at_any_effect`.
    """

    seeds: int
    questions: int
    treated: stats.Interval
    control: stats.Interval
    effect: stats.Interval
    oriented: np.ndarray
    p_for: float
    p_against: float
    effect_size: float
    probability_of_improvement: float
    guardrail: str
    adjusted: tuple[float, float] = (1.0, 1.0)
    seeds_as_measured: int | None = None
    seeds_at_any_effect: int | None = None


@dataclass(frozen=True)
class Row:
    """The verdict on one contrast of a claim; `context` has the settings that tell it from others of its name."""

    claim: Claim
    contrast: Contrast
    verdict: Verdict
    why: str
    context: tuple[tuple[str, str], ...] = ()
    finished: tuple[int, int] = (0, 0)
    started: tuple[int, int] = (0, 0)
    numbers: Numbers | None = None


def judge(counted: Sequence[Record], found: Sequence[Run], claims: Sequence[Claim] = CLAIMS) -> list[Row]:
    """A row a contrast and pair of arms; a contrast that lacks an arm has one too."""
    rows: list[Row] = []
    found = started(found, [record.run for record in counted])
    for claim in claims:
        for contrast in claim.contrasts:
            pairs = find(claim, contrast, counted, found)
            if isinstance(pairs, Missing):
                rows.append(Row(claim, contrast, Verdict.UNDECIDED, pairs.why))
            else:
                rows += [_measured(claim, contrast, pair) for pair in pairs]
    return decided(_told_apart(rows))


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """The rows with what of their context differs between those of one contrast, and no task's name tells."""
    shown = []
    for row in rows:
        others = [other.context for other in rows if other.claim == row.claim and other.contrast == row.contrast]
        common = set.intersection(*(set(context) for context in others))
        told = told_by_task([dict(context) for context in others])
        own = (item for item in row.context if item not in common and item[0] not in told)
        shown.append(replace(row, context=tuple(own)))
    return shown


def _measured(claim: Claim, contrast: Contrast, pair: Pair) -> Row:
    row = Row(
        claim, contrast, Verdict.UNDECIDED, "", _context(claim, pair),
        (pair.treated.finished, pair.control.finished), (pair.treated.started, pair.control.started),
    )  # fmt: skip
    shared = pair.treated.seeds & pair.control.seeds
    if len(shared) < FEWEST_SEEDS:
        return replace(row, why=f"seeds that both arms have: {len(shared)}, of {FEWEST_SEEDS} that are needed")
    if claim.best_of and min(len(pair.treated.options), len(pair.control.options)) < 2:
        return replace(row, why=f"an arm has one value of {claim.best_of}, so there is no best")
    try:
        return replace(row, numbers=numbers(claim, pair, sorted(shared)))
    except Unmeasured as error:
        return replace(row, why=str(error))


def _context(claim: Claim, pair: Pair) -> tuple[tuple[str, str], ...]:
    """The settings of a pair; of a key that may differ both values, without that at whose best value each arm is."""
    own = [dict(side.records[0].run.arm) for side in (pair.treated, pair.control)]
    shared = dict(pair.context)
    free = own[0].keys() - shared.keys() - {claim.best_of}
    differ = {key: f"{own[0][key]} / {own[1].get(key)}" for key in free}
    return tuple(sorted((shared | differ).items()))


def numbers(claim: Claim, pair: Pair, seeds: Sequence[int]) -> Numbers:
    """Measure a pair over its shared seeds. Raises Unmeasured where the records do not hold the measure."""
    values = [_values(claim, claim.measure, side, pair, seeds) for side in (pair.treated, pair.control)]
    is_ratio = MEASURES[claim.measure].ratio
    both = sorted(set(values[0].columns) & set(values[1].columns))
    if not both or (len(both) == 1 and values[0].shape[1] > 1):
        raise Unmeasured("the two arms were asked fewer than two of the same questions")
    treated, control = (one[both].to_numpy(float) for one in values)
    effect = treated - control
    sign = claim.direction or 1
    oriented = sign * effect
    p_for, p_against = p_values(oriented, claim)
    return Numbers(
        seeds=len(seeds), questions=len(both), treated=_shown(treated, is_ratio), control=_shown(control, is_ratio),
        effect=_shown(effect, is_ratio), oriented=oriented, p_for=p_for, p_against=p_against,
        effect_size=stats.effect_size(oriented.mean(1)),
        probability_of_improvement=stats.probability_of_improvement(sign * treated.mean(1), sign * control.mean(1)),
        guardrail=_guardrail(claim, pair, seeds) if claim.guardrail else "",
    )  # fmt: skip


def _shown(values_S_Q: np.ndarray, is_ratio: bool) -> stats.Interval:
    mean, low, high = stats.over_seeds(values_S_Q)
    return (math.exp(mean), math.exp(low), math.exp(high)) if is_ratio else (mean, low, high)


def _values(claim: Claim, measure: str, side: Side, pair: Pair, seeds: Sequence[int]) -> Values:
    """A measure of a side by seed; of several options that which was best over the other seeds, so that no seed
    chooses for itself."""
    options = [_of_option(measure, records, pair.control.records).loc[list(seeds)] for records in side.options.values()]
    if len(options) == 1:
        return options[0]
    columns = [column for column in options[0].columns if all(column in option for option in options)]
    better = _choosing(claim, side, pair, seeds)
    best = {seed: options[int(np.argmax([option.drop(seed).mean() for option in better]))].loc[seed] for seed in seeds}
    return pd.DataFrame(best).T[columns]


def _choosing(claim: Claim, side: Side, pair: Pair, seeds: Sequence[int]) -> list[pd.Series]:
    """What the options are chosen by: the claim's own measure, also for its guardrail."""
    sign = claim.direction or 1
    return [
        sign * _of_option(claim.measure, records, pair.control.records).loc[list(seeds)].mean(axis=1)
        for records in side.options.values()
    ]


def _of_option(measure: str, records: Sequence[Record], controls: Sequence[Record]) -> Values:
    values = MEASURES[measure].of(records, controls).dropna(axis=1)
    return np.log(values) if MEASURES[measure].ratio else values


def smallest(claim: Claim) -> float:
    """The smallest effect of interest as it is tested."""
    return math.log(claim.smallest) if MEASURES[claim.measure].ratio else claim.smallest


def smallest_as_text(claim: Claim) -> str:
    """The smallest effect of interest as it is stated: `0.02`, of a ratio `1.1x`."""
    return f"{claim.smallest:g}x" if MEASURES[claim.measure].ratio else f"{claim.smallest:g}"


def p_values(oriented_S_Q: np.ndarray, claim: Claim, seeds: int | None = None) -> tuple[float, float]:
    """One-sided p-values for and against a claim; with `seeds` those of so many, of the same mean and spread.

    For: of no effect. Against: of one that is at least the smallest of interest. Of a claim of no difference, for: of
    one that is as large as that, either way (two one-sided tests, the larger p-value); against: of one that is
    smaller (twice the smaller p-value, as either side could show it).
    """
    margin = smallest(claim)

    def above(sign: int, null: float) -> float:
        return stats.p_above(sign * oriented_S_Q, null, seeds)

    if claim.direction:
        return above(1, 0.0), above(-1, -margin)
    inside = max(above(1, -margin), above(-1, -margin))
    outside = min(above(1, margin), above(-1, margin))
    return inside, min(1.0, 2 * outside)


HELD, BROKEN, OPEN = "held", "broken", "open"


def _guardrail(claim: Claim, pair: Pair, seeds: Sequence[int]) -> str:
    """Whether the treated arm's guardrail is shown to hold (an interval of 95% above -margin), or to be broken."""
    assert claim.guardrail is not None
    rail: Guardrail = claim.guardrail
    try:
        treated, control = (_values(claim, rail.measure, side, pair, seeds) for side in (pair.treated, pair.control))
    except Unmeasured:
        return OPEN
    difference = (treated - control).dropna(axis=1)
    if difference.shape[1] < min(2, treated.shape[1]):  # the arms were asked other questions
        return OPEN
    _, low, high = stats.over_seeds(difference.to_numpy(float))
    return HELD if low > -rail.margin else BROKEN if high < -rail.margin else OPEN


def decided(rows: Sequence[Row]) -> list[Row]:
    """The rows with their p-values corrected in their families, and verdicts."""
    return [_decide(row, _others(rows, n)) if row.numbers else row for n, row in enumerate(rows)]


def _others(rows: Sequence[Row], index: int) -> list[Numbers]:
    """What was measured of the other contrasts of a row's family."""
    family = rows[index].claim.family
    return [row.numbers for n, row in enumerate(rows) if n != index and row.claim.family == family and row.numbers]


def family_sizes(rows: Sequence[Row]) -> dict[str, int]:
    """How many contrasts of each family were measured, and so corrected for."""
    families = [row.claim.family for row in rows if row.numbers]
    return {family: families.count(family) for family in families}


def _adjusted(own: tuple[float, float], others: Sequence[Numbers]) -> tuple[float, float]:
    """The p-values of a contrast, by Holm beside those of the others."""
    p_for, p_against = own
    return (
        stats.holm([p_for, *(other.p_for for other in others)])[0],
        stats.holm([p_against, *(other.p_against for other in others)])[0],
    )


def _decide(row: Row, others: Sequence[Numbers]) -> Row:
    numbers, claim = row.numbers, row.claim
    assert numbers is not None
    p_for, p_against = adjusted = _adjusted((numbers.p_for, numbers.p_against), others)
    found = replace(numbers, adjusted=adjusted)
    if p_against < LEVEL:
        return replace(row, numbers=found, verdict=Verdict.CONTRADICTED, why=_against(claim, found))
    if p_for < LEVEL and numbers.guardrail != BROKEN:
        return replace(row, numbers=found, verdict=Verdict.SUPPORTED, why=_for(claim, found))
    if p_for < LEVEL and claim.guardrail:
        why = f"the effect is there, but {claim.guardrail.measure} is lower by more than {claim.guardrail.margin}"
        return replace(row, numbers=found, verdict=Verdict.UNDECIDED, why=why)
    found = replace(
        found, seeds_as_measured=_seeds_as_measured(claim, found, others),
        seeds_at_any_effect=_seeds_at_any_effect(claim, found, 1 + len(others)),
    )  # fmt: skip
    return replace(row, numbers=found, verdict=Verdict.UNDECIDED, why=_open(claim, found))


def _seeds_as_measured(claim: Claim, numbers: Numbers, others: Sequence[Numbers]) -> int | None:
    """The fewest seeds that decide a contrast if its effect, its spread and all others stay as they were measured.

    By the test of the verdict itself. None where `stats.MOST_SEEDS` do not: the effect lies too near a border.
    """

    def decide(seeds: int) -> bool:
        p_for, p_against = _adjusted(p_values(numbers.oriented, claim, seeds), others)
        return p_against < LEVEL or (p_for < LEVEL and numbers.guardrail != BROKEN)

    return stats.fewest_seeds(decide, numbers.seeds + 1)


def _seeds_at_any_effect(claim: Claim, numbers: Numbers, family: int) -> int | None:
    """The fewest seeds whose interval is no wider than the smallest effect: it cannot hold both 0 and that effect.

    At the level of the first of a family by Holm. None where `stats.MOST_SEEDS` are too few, and where no width
    decides: of a claim of no difference, which has one border on each side, and beside a broken guardrail.
    """
    if not claim.direction or numbers.guardrail == BROKEN:
        return None
    variances, level = stats.components_to_expect(numbers.oriented), 1 - 2 * LEVEL / family

    def decide(seeds: int) -> bool:
        return 2 * stats.half_width(variances, seeds, numbers.questions, level) <= smallest(claim)

    return stats.fewest_seeds(decide, FEWEST_SEEDS)


def _against(claim: Claim, numbers: Numbers) -> str:
    if not claim.direction:
        return f"the difference is larger than {claim.smallest:g}"
    size = smallest_as_text(claim)
    also = ", and above 0" if numbers.adjusted[0] < LEVEL else ""
    return f"an effect of {size} or more is excluded{also}"


def _for(claim: Claim, numbers: Numbers) -> str:
    said = f"within {claim.smallest:g} either way" if not claim.direction else "the effect is above 0"
    return said + (
        f"; guardrail {claim.guardrail.measure} is open" if claim.guardrail and numbers.guardrail == OPEN else ""
    )


def _open(claim: Claim, numbers: Numbers) -> str:
    first, any_effect = numbers.seeds_as_measured, numbers.seeds_at_any_effect
    if first:
        rest = f", {any_effect} whatever it is" if any_effect and any_effect > first else ""
        return f"about {first} seeds would decide it if the effect is as measured{rest}"
    if claim.guardrail and numbers.guardrail == BROKEN and numbers.oriented.mean() >= smallest(claim):
        rail = claim.guardrail
        return f"no seeds would decide it: it looks large, but {rail.measure} is lower by more than {rail.margin}"
    more = f" with {numbers.questions} questions: type a larger eval.questions" if numbers.questions > 1 else ""
    return f"the measured effect is so near a border that not even {stats.MOST_SEEDS:,} seeds would decide it{more}"
