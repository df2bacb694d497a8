"""Verdicts on claims, with the numbers behind them. Pure.

A contrast's effect is the treated arm's measure less the control's, paired by seed (and question), of a ratio in
logarithms, and turned so that the claim says that it is above 0. Three one-sided tests at `LEVEL` decide: that it is
above 0, that it is below the smallest effect that matters, that it is below 0. Each has Holm's correction over the
measured contrasts of its family, and a variance that is moderated by those of the family.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qerl_lab.report import effects, reference, stats
from qerl_lab.report.arms import Run, started, told_by_task
from qerl_lab.report.claims import Claim, Contrast, of_paper
from qerl_lab.report.comparison import CONDITIONS
from qerl_lab.report.contrasts import Missing, Pair, find
from qerl_lab.report.effects import BROKEN, OPEN, Numbers, P
from qerl_lab.report.measures import MEASURES, Unmeasured
from qerl_lab.report.runs import Record

LEVEL = 0.025  # of each one-sided test: an interval of 95% leaves out what it rejects


class Verdict(StrEnum):
    SUPPORTED = "supported"
    TOO_SMALL = "too small to matter"
    EXCLUDED = "excluded"
    REVERSED = "reversed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Row:
    """The verdict on one contrast of a claim.

    `context` has the settings that tell it from others of its name, `conditions` the values of `CONDITIONS`, `printed`
    the paper's own effects by where they stand, and `registered` says whether the claim was committed before the runs.
    """

    claim: Claim
    contrast: Contrast
    verdict: Verdict
    why: str
    context: tuple[tuple[str, str], ...] = ()
    conditions: tuple[tuple[str, str], ...] = ()
    registered: str = ""
    printed: tuple[tuple[str, float], ...] = ()
    finished: tuple[int, int] = (0, 0)
    started: tuple[int, int] = (0, 0)
    numbers: Numbers | None = None


def judge(counted: Sequence[Record], found: Sequence[Run], claims: Sequence[Claim] | None = None) -> list[Row]:
    """A row a contrast and pair of arms; a contrast that lacks an arm has one too. The paper's claims by default."""
    rows: list[Row] = []
    found = started(found, [record.run for record in counted])
    for claim in of_paper() if claims is None else claims:
        for contrast in claim.contrasts:
            pairs = find(claim, contrast, counted, found)
            if isinstance(pairs, Missing):
                rows.append(Row(claim, contrast, Verdict.UNDECIDED, pairs.why, printed=printed(claim, contrast)))
            else:
                rows += [_measured(claim, contrast, pair) for pair in pairs]
    return decided(pooled(_told_apart(rows)))


def printed(claim: Claim, contrast: Contrast) -> tuple[tuple[str, float], ...]:
    """The paper's own effect of a contrast, by model: a factor of a ratio, else a difference; percent as fractions.

    An effect that was read off a figure has the reading error in its name.
    """
    found = []
    for treated, control in contrast.printed:
        effect = reference.compared(treated, control, MEASURES[claim.measure].ratio)
        scale = 100 if treated.get("metric") == "accuracy" else 1  # printed in percent
        model = treated.get("model", "").removeprefix("Qwen2.5-").removesuffix("-Instruct")
        error = f", +-{effect.error:g}" if effect.error else ""
        found.append((f"{treated['table']} {model}".strip() + error, effect.value / scale))
    return tuple(found)


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
    if claim.mean_over:
        pair = _of_shared_values(pair)
    row = Row(
        claim, contrast, Verdict.UNDECIDED, "", _context(claim, pair), _conditions(claim, pair),
        _registered(claim, pair), printed(claim, contrast), (pair.treated.finished, pair.control.finished),
        (pair.treated.started, pair.control.started),
    )  # fmt: skip
    if claim.mean_over and len(pair.treated.options.keys() & pair.control.options.keys()) < 2:
        return replace(row, why=f"the arms share no two values of {claim.mean_over} to take the mean over")
    shared = pair.treated.seeds & pair.control.seeds
    if len(shared) < claim.file.seeds:
        return replace(row, why=f"seeds that both arms have: {len(shared)}, of {claim.file.seeds} that are needed")
    if claim.best_of and min(len(pair.treated.options), len(pair.control.options)) < 2:
        return replace(row, why=f"an arm has one value of {claim.best_of}, so there is no best")
    try:
        return replace(row, numbers=effects.numbers(claim, pair, sorted(shared)))
    except Unmeasured as error:
        return replace(row, why=str(error))


def _of_shared_values(pair: Pair) -> Pair:
    """The pair at those values of the key that the claim spans which both sides have, in one order.

    Itself where they share none.
    """
    both = [at for at in pair.treated.options if at in pair.control.options]
    if not both:
        return pair
    treated, control = (
        replace(side, options={at: side.options[at] for at in both}) for side in (pair.treated, pair.control)
    )
    return replace(pair, treated=treated, control=control)


def _context(claim: Claim, pair: Pair) -> tuple[tuple[str, str], ...]:
    """The settings of a pair; of a key that may differ both values, without the key that the claim spans."""
    own = [dict(side.records[0].run.arm) for side in (pair.treated, pair.control)]
    shared = dict(pair.context)
    free = own[0].keys() - shared.keys() - {claim.across}
    differ = {key: f"{own[0][key]} / {own[1].get(key)}" for key in free}
    return tuple(sorted((shared | differ).items()))


def _conditions(claim: Claim, pair: Pair) -> tuple[tuple[str, str], ...]:
    """The values of `CONDITIONS` of a pair's runs; of several the words say what the claim does with them."""
    runs = [record.run for side in (pair.treated, pair.control) for record in side.records]
    found = []
    for key in CONDITIONS:
        values = sorted({run.value(key) for run in runs if key in run.settings}, key=_by_size)
        if values:
            how = {claim.best_of: ", each arm's best of ", claim.mean_over: ", mean over "}.get(key, "")
            found.append((key, f"{how.removeprefix(', ')}{', '.join(values)}"))
    return tuple(found)


def _by_size(text: str) -> tuple[float, str]:
    try:
        return float(text), text
    except ValueError:
        return math.inf, text


def _registered(claim: Claim, pair: Pair) -> str:
    """Whether the runs of a pair record the SHA-256 of the claim's file, which was then there before they began."""
    records = [*pair.treated.records, *pair.control.records]
    holding = sum(record.origin.claims_sha256 == claim.file.sha256 for record in records)
    if holding == len(records):
        return f"preregistered: all {holding} runs record this file's hash"
    later = f"; the claim was added on {claim.added}" if claim.added else ""
    return f"not preregistered: {holding} of {len(records)} runs record this file's hash{later}"


def smallest(claim: Claim) -> float:
    """The smallest effect of interest as it is tested."""
    return math.log(claim.smallest) if MEASURES[claim.measure].ratio else claim.smallest


def smallest_as_text(claim: Claim) -> str:
    """The smallest effect of interest as it is stated: `0.02`, of a ratio `1.1x`."""
    return f"{claim.smallest:g}x" if MEASURES[claim.measure].ratio else f"{claim.smallest:g}"


def effect_as_text(claim: Claim, value: float) -> str:
    """`+0.013`, of a ratio `1.23x`."""
    return f"{value:.2f}x" if MEASURES[claim.measure].ratio else f"{value:+.3f}"


def pooled(rows: Sequence[Row]) -> list[Row]:
    """The rows with variances moderated over the contrasts of their family and measure, and p-values by them.

    Variances of censored contrasts are those of bounds: they are not moderated, and moderate no other.
    """
    family: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.numbers and not row.numbers.censored:
            family.setdefault((row.claim.family, row.claim.measure), []).append(row.numbers.variances[0])
    done = []
    for row in rows:
        if found := row.numbers:
            of_seeds, of_questions = found.variances
            if not found.censored:
                of_seeds = stats.moderated(of_seeds, family[row.claim.family, row.claim.measure])
            found = replace(found, variances=(of_seeds, of_questions))
            row = replace(row, numbers=replace(found, p=p_values(found, row.claim)))
        done.append(row)
    return done


def p_values(numbers: Numbers, claim: Claim, seeds: int | None = None) -> P:
    """The p-values of a contrast; with `seeds` those of so many, of the same mean and variances.

    Of a claim of no difference, `above`: of one that is as large as the smallest, either way (two one-sided tests, the
    larger p-value); `small`: of one that is smaller (twice the smaller p-value, as either side could show it).
    """
    margin, count = smallest(claim), seeds or numbers.seeds
    low, high = float(numbers.oriented.mean()), float(numbers.at_most.mean())

    def above(mean: float, null: float) -> float:
        return stats.p_above(mean, numbers.variances, count, numbers.questions, null)

    if claim.direction:
        return P(above(low, 0.0), above(-high, -margin), above(-high, 0.0))
    inside = max(above(low, -margin), above(-high, -margin))
    outside = min(above(low, margin), above(-high, margin))
    return P(inside, min(1.0, 2 * outside), 1.0)


def decided(rows: Sequence[Row]) -> list[Row]:
    """The rows with their p-values corrected in their families, and verdicts."""
    return [_decide(row, _others(rows, n)) if row.numbers else row for n, row in enumerate(rows)]


def _others(rows: Sequence[Row], index: int) -> list[P]:
    """The p-values of the other contrasts of a row's family."""
    family = rows[index].claim.family
    return [row.numbers.p for n, row in enumerate(rows) if n != index and row.claim.family == family and row.numbers]


def family_sizes(rows: Sequence[Row]) -> dict[str, int]:
    """How many contrasts of each family were measured, and so corrected for."""
    families = [row.claim.family for row in rows if row.numbers]
    return {family: families.count(family) for family in families}


def _adjusted(own: P, others: Sequence[P]) -> P:
    """The p-values of a contrast, each by Holm beside those of the others."""
    return P(*(stats.holm([p, *(other[n] for other in others)])[0] for n, p in enumerate(own)))


def _verdict(claim: Claim, adjusted: P) -> Verdict:
    is_above, is_small, is_below = (p < LEVEL for p in adjusted)
    if is_below:
        return Verdict.REVERSED
    if is_above:
        return Verdict.TOO_SMALL if is_small and claim.direction else Verdict.SUPPORTED
    return Verdict.EXCLUDED if is_small else Verdict.UNDECIDED


def _decide(row: Row, others: Sequence[P]) -> Row:
    found, claim = row.numbers, row.claim
    assert found is not None
    found = replace(found, adjusted=_adjusted(found.p, others))
    verdict = _verdict(claim, found.adjusted)
    if verdict != Verdict.UNDECIDED:
        why = _why(claim, verdict)
        return replace(row, numbers=found, verdict=verdict, why=why + _beside(row, found, verdict))
    found = replace(
        found, seeds_as_measured=_seeds_as_measured(claim, found, others),
        seeds_at_any_effect=_seeds_at_any_effect(claim, found, 1 + len(others)),
    )  # fmt: skip
    then = _verdict_at(claim, found, others, found.seeds_as_measured) if found.seeds_as_measured else verdict
    return replace(row, numbers=found, verdict=verdict, why=_open(claim, found, then) + _beside(row, found, then))


def _why(claim: Claim, verdict: Verdict) -> str:
    size = smallest_as_text(claim)
    if not claim.direction:
        return f"within {size} either way" if verdict == Verdict.SUPPORTED else f"the difference is larger than {size}"
    return {
        Verdict.SUPPORTED: "the effect is there",
        Verdict.TOO_SMALL: f"the effect is there, and below {size}",
        Verdict.EXCLUDED: f"an effect of {size} or more is excluded",
        Verdict.REVERSED: "the effect has the other sign",
    }[verdict]


def _beside(row: Row, found: Numbers, verdict: Verdict) -> str:
    """What a verdict, or the one that more seeds would give, does not say: seeds, guardrail, the paper's own value."""
    claim, said = row.claim, ""
    if found.censored:
        said += f"; censored seeds: {found.censored} of {found.seeds}"
    if claim.guardrail and found.guardrail in (BROKEN, OPEN):
        state = f"broken: lower by more than {claim.guardrail.margin:g}" if found.guardrail == BROKEN else "open"
        said += f"; guardrail {claim.guardrail.measure} is {state}"
    small = [(where, value) for where, value in row.printed if _size(claim, value) < smallest(claim)]
    if small and claim.direction and verdict in (Verdict.EXCLUDED, Verdict.TOO_SMALL):
        listed = ", ".join(f"{effect_as_text(claim, value)} ({where})" for where, value in small)
        said += f"; this cannot contradict the paper's {listed}, which is below {smallest_as_text(claim)}"
    return said


def _size(claim: Claim, printed: float) -> float:
    """A printed effect as it is tested."""
    return (claim.direction or 1) * (math.log(printed) if MEASURES[claim.measure].ratio else printed)


def _verdict_at(claim: Claim, found: Numbers, others: Sequence[P], seeds: int) -> Verdict:
    """The verdict of so many seeds, if effect, spread and all others stay as they were measured."""
    return _verdict(claim, _adjusted(p_values(found, claim, seeds), others))


def _seeds_as_measured(claim: Claim, found: Numbers, others: Sequence[P]) -> int | None:
    """The fewest seeds that decide a contrast, by the test of the verdict itself.

    None where `stats.MOST_SEEDS` do not: the effect lies too near a border.
    """
    return stats.fewest_seeds(
        lambda seeds: _verdict_at(claim, found, others, seeds) != Verdict.UNDECIDED, found.seeds + 1
    )


def _seeds_at_any_effect(claim: Claim, found: Numbers, family: int) -> int | None:
    """The fewest seeds whose interval is no wider than the smallest effect: it cannot hold both 0 and that effect.

    At the level of the first of a family by Holm. None where `stats.MOST_SEEDS` are too few, and of a claim of no
    difference, which has one border on each side.
    """
    if not claim.direction or found.censored:
        return None
    level = 1 - 2 * LEVEL / family

    def decide(seeds: int) -> bool:
        return 2 * stats.half_width(found.variances, seeds, found.questions, level) <= smallest(claim)

    return stats.fewest_seeds(decide, claim.file.seeds)


def _open(claim: Claim, found: Numbers, then: Verdict) -> str:
    """What more seeds would say."""
    first, any_effect, size = found.seeds_as_measured, found.seeds_at_any_effect, smallest_as_text(claim)
    if first:
        would = {
            Verdict.SUPPORTED: "support it", Verdict.TOO_SMALL: f"show it to be there and below {size}",
            Verdict.EXCLUDED: f"exclude {size} or more", Verdict.REVERSED: "show the other sign",
        }[then]  # fmt: skip
        if not claim.direction and then == Verdict.EXCLUDED:
            would = f"show a difference larger than {size}"
        rest = f", {any_effect} decide whatever it is" if any_effect and any_effect > first else ""
        return f"about {first} seeds would {would} if the effect is as measured{rest}"
    if found.censored:
        return "too many runs never got there to tell"
    more = f" with {found.questions} questions: type a larger eval.questions" if found.questions > 1 else ""
    return f"the measured effect is so near a border that not even {stats.MOST_SEEDS:,} seeds would decide it{more}"
