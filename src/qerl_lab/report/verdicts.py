"""Reach verdicts on claims, with the numbers behind them. Pure.

The effect of a contrast is the treated measure minus the control's, paired by seed (and question), in logarithms for a
ratio, with the sign chosen so that the claim predicts a positive effect. Three one-sided tests at `LEVEL` decide: the
effect is above 0, below the smallest effect that matters, below 0. Each is Holm-corrected over the measured contrasts
of its family and uses a variance moderated by the family.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from qerl_lab.report import reference, stats
from qerl_lab.report.arms import keys_implied_by_task, number_first
from qerl_lab.report.claims import Claim, Contrast, of_paper
from qerl_lab.report.comparison import CONDITIONS
from qerl_lab.report.effects import BROKEN, OPEN, Numbers, P, Pair, find_pairs, measure_pair
from qerl_lab.report.measures import Unmeasured, has_collapsed
from qerl_lab.report.runs import Run

LEVEL = 0.025  # of each one-sided test, which matches a 95% interval


class Verdict(StrEnum):
    SUPPORTED = "supported"
    TOO_SMALL = "too small to matter"
    EXCLUDED = "excluded"
    REVERSED = "reversed"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Row:
    """The verdict on one contrast of a claim.

    `context` holds the settings that distinguish it from contrasts of the same name, `conditions` the values of
    `CONDITIONS`. `printed` maps sources in the paper to its effects. `registered` says whether the claim was committed
    before the runs. `finished`, `started` and `collapsed` count runs of the treated and the control arm; `collapsed`
    stays 0 unless the measure is `answers_last`.
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
    collapsed: tuple[int, int] = (0, 0)
    numbers: Numbers | None = None

    @property
    def judged(self) -> Numbers | None:
        """Return `numbers` if they have enough seeds for a verdict on the claim, else None."""
        return self.numbers if self.numbers and self.numbers.seeds >= self.claim.file.seeds else None


def judge(counted: Sequence[Run], runs: Sequence[Run], claims: Sequence[Claim] | None = None) -> list[Row]:
    """Reach a verdict on each contrast of the claims (default: the paper's); return a row per pair of arms it compares.

    A contrast without such a pair has one row, without numbers, with the reason in `why`.

    Args:
        counted: the runs that give the numbers: the newest finished run of each arm and seed.
        runs: every run; the unfinished ones only add to the numbers of started runs.
    """
    rows: list[Row] = []
    started = [*counted, *(run for run in runs if not run.is_finished)]
    for claim in of_paper() if claims is None else claims:
        for contrast in claim.contrasts:
            row = Row(claim, contrast, Verdict.UNDECIDED, "", printed=paper_effects(claim, contrast))
            try:
                rows += [_measure_row(row, pair) for pair in find_pairs(claim, contrast, counted, started)]
            except Unmeasured as error:
                rows.append(replace(row, why=str(error)))
    return set_verdicts(pool_variances(_reduce_contexts(rows)))


def paper_effects(claim: Claim, contrast: Contrast) -> tuple[tuple[str, float], ...]:
    """Return the paper's effects of a contrast as (source, effect): factors for ratios, else differences.

    Accuracies printed in percent become fractions. The source of an effect read off a figure includes the reading
    error.
    """
    found = []
    for treated, control in contrast.printed:
        effect = reference.paper_difference(treated, control, claim.is_ratio)
        scale = 100 if treated.get("metric") == "accuracy" else 1  # printed in percent
        model = treated.get("model", "").removeprefix("Qwen2.5-").removesuffix("-Instruct")
        error = f", +-{effect.error:g}" if effect.error else ""
        found.append((f"{treated['table']} {model}".strip() + error, effect.value / scale))
    return tuple(found)


def _measure_row(row: Row, pair: Pair) -> Row:
    """Return the row with settings, conditions, counts of runs and numbers of a pair of arms.

    If the pair cannot be measured, `why` has the reason and there are no numbers.
    """
    claim, sides = row.claim, (pair.treated, pair.control)
    # settings: both values for keys that may differ, without the key that the claim spans
    treated, control = (dict(side.runs[0].arm) for side in sides)
    free = treated.keys() - dict(pair.context).keys() - {claim.spanned_key}
    context = dict(pair.context) | {key: f"{treated[key]} / {control.get(key)}" for key in free}
    runs, conditions = [run for side in sides for run in side.runs], []
    for key in CONDITIONS:
        values = sorted({run.value(key) for run in runs if key in run.settings}, key=number_first)
        how = {claim.best_of: "each arm's best of ", claim.mean_over: "mean over "}.get(key, "")
        conditions += [(key, how + ", ".join(values))] if values else []
    holding = sum(run.origin.claims_sha256 == claim.file.sha256 for run in runs)
    registered = f"preregistered: all {holding} runs record this file's hash"
    if holding < len(runs):
        later = f"; the claim was added on {claim.added}" if claim.added else ""
        registered = f"not preregistered: {holding} of {len(runs)} runs record this file's hash{later}"
    row = replace(
        row, context=tuple(sorted(context.items())), conditions=tuple(conditions), registered=registered,
        finished=(pair.treated.finished, pair.control.finished), started=(pair.treated.started, pair.control.started),
    )  # fmt: skip
    try:
        row = replace(row, numbers=measure_pair(claim, pair))
    except Unmeasured as error:
        return replace(row, why=str(error))
    if claim.measure == "answers_last":  # its mean alone does not show how many runs fell
        fell = [sum(map(has_collapsed, side.runs)) for side in sides]
        row = replace(row, collapsed=(fell[0], fell[1]))
    return row


def _reduce_contexts(rows: Sequence[Row]) -> list[Row]:
    """Keep in each row's `context` only settings that differ between the rows of its contrast.

    Settings that follow from the task's name are dropped too.
    """
    shown = []
    for row in rows:
        others = [other.context for other in rows if other.claim == row.claim and other.contrast == row.contrast]
        common = set.intersection(*(set(context) for context in others))
        implied = keys_implied_by_task([dict(context) for context in others])
        own = (item for item in row.context if item not in common and item[0] not in implied)
        shown.append(replace(row, context=tuple(own)))
    return shown


def pool_variances(rows: Sequence[Row]) -> list[Row]:
    """Raise each contrast's variance between seeds to the median of its family and measure, and compute p-values.

    Censored contrasts keep their variance and do not count in the median, because their variances describe bounds.
    """
    family: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row.judged and not row.judged.censored:
            family.setdefault((row.claim.family, row.claim.measure), []).append(row.judged.variances[0])
    done = []
    for row in rows:
        if found := row.judged:
            of_seeds, of_questions = found.variances
            if not found.censored:
                of_seeds = stats.moderated_variance(of_seeds, family[row.claim.family, row.claim.measure])
            found = replace(found, variances=(of_seeds, of_questions))
            row = replace(row, numbers=replace(found, p=p_values(found, row.claim)))
        done.append(row)
    return done


def p_values(numbers: Numbers, claim: Claim, seeds: int | None = None) -> P:
    """Compute the uncorrected p-values of a contrast; `seeds` replaces its number of seeds, all else equal.

    For a claim of no difference the tests are of equivalence. A small `above` rejects effects of at least the smallest
    size that matters: the larger p-value of two one-sided tests. A small `small` rejects smaller effects: twice the
    smaller p-value, because either side could show it.
    """
    low, high = float(numbers.oriented.mean()), float(numbers.at_most.mean())

    def p_above(mean: float, null: float) -> float:
        """Return the one-sided p-value of a mean effect above `null`."""
        return stats.p_above(mean, numbers.variances, seeds or numbers.seeds, numbers.questions, null)

    if claim.direction:
        return P(p_above(low, 0.0), p_above(-high, -claim.margin), p_above(-high, 0.0))
    inside = max(p_above(low, -claim.margin), p_above(-high, -claim.margin))
    outside = min(p_above(low, claim.margin), p_above(-high, claim.margin))
    return P(inside, min(1.0, 2 * outside), 1.0)


def family_sizes(rows: Sequence[Row]) -> dict[str, int]:
    """Map each family to its number of judged contrasts, for which p-values are corrected."""
    return dict(Counter(row.claim.family for row in rows if row.judged))


def set_verdicts(rows: Sequence[Row]) -> list[Row]:
    """Correct p-values within families and set the verdict of each row that has seeds enough; others stay undecided."""
    done = []
    for row in rows:
        others = [other.judged.p for other in rows
                  if other.judged and other is not row and other.claim.family == row.claim.family]  # fmt: skip
        if row.judged:
            row = _decide(row, row.judged, others)
        elif row.numbers:
            row = replace(row, why=f"{row.numbers.seeds} of {row.claim.file.seeds} seeds: an interval, no verdict yet")
        done.append(row)
    return done


def _decide(row: Row, numbers: Numbers, others: Sequence[P]) -> Row:
    """Return the row of a measured contrast with verdict, reason and corrected p-values.

    `others` holds the p-values of the other contrasts of its family. If the verdict is open, the reason says how many
    seeds would decide it.
    """
    claim = row.claim

    def verdict_of(own: P) -> tuple[P, Verdict]:
        """Adjust the p-values by Holm within the family, and return them with the verdict that they allow."""
        adjusted = P(*(stats.holm([p, *(other[n] for other in others)])[0] for n, p in enumerate(own)))
        is_above, is_small, is_below = (p < LEVEL for p in adjusted)
        if is_below:
            return adjusted, Verdict.REVERSED
        if is_above:
            return adjusted, Verdict.TOO_SMALL if is_small and claim.direction else Verdict.SUPPORTED
        return adjusted, Verdict.EXCLUDED if is_small else Verdict.UNDECIDED

    adjusted, verdict = verdict_of(numbers.p)
    numbers, then = replace(numbers, adjusted=adjusted), verdict
    why = _phrases(claim)[verdict][0]
    if verdict == Verdict.UNDECIDED:

        def verdict_at(seeds: int) -> Verdict:
            """Return the verdict at `seeds` seeds if effect, spread and the other contrasts stay as measured."""
            return verdict_of(p_values(numbers, claim, seeds))[1]

        first = stats.fewest_seeds(lambda seeds: verdict_at(seeds) != Verdict.UNDECIDED, numbers.seeds + 1)
        any_effect = _seeds_at_any_effect(claim, numbers, 1 + len(others))
        numbers = replace(numbers, seeds_as_measured=first, seeds_at_any_effect=any_effect)
        if first:
            then = verdict_at(first)
            rest = f", {any_effect} decide whatever it is" if any_effect and any_effect > first else ""
            why = f"about {first} seeds would {_phrases(claim)[then][1]} if the effect is as measured{rest}"
        elif numbers.censored:
            why = "too many runs never got there to tell"
        else:
            more = f" with {numbers.questions} questions: type a larger eval.questions"
            why = (
                f"the measured effect is so near a border that not even {stats.MOST_SEEDS:,} seeds would decide it"
                f"{more if numbers.questions > 1 else ''}"
            )
    if numbers.censored:
        why += f"; censored seeds: {numbers.censored} of {numbers.seeds}"
    if claim.guardrail and numbers.guardrail in (BROKEN, OPEN):
        state = f"broken: lower by more than {claim.guardrail.margin:g}" if numbers.guardrail == BROKEN else "open"
        why += f"; guardrail {claim.guardrail.measure} is {state}"
    if claim.direction and then in (Verdict.EXCLUDED, Verdict.TOO_SMALL):
        oriented = [(claim.direction * (math.log(value) if claim.is_ratio else value), value, where)
                    for where, value in row.printed]  # fmt: skip
        small = [f"{claim.spell(value)} ({where})" for effect, value, where in oriented if effect < claim.margin]
        if small:
            why += f"; this cannot contradict the paper's {', '.join(small)}, which is below {claim.smallest_as_text}"
    return replace(row, numbers=numbers, verdict=verdict, why=why)


def _phrases(claim: Claim) -> dict[Verdict, tuple[str, str]]:
    """Map each verdict on a claim to two phrases: what it says now, and what more seeds would do to reach it."""
    size = claim.smallest_as_text
    either_way = {
        Verdict.SUPPORTED: (f"within {size} either way", "support it"),
        Verdict.EXCLUDED: (f"the difference is larger than {size}", f"show a difference larger than {size}"),
    }
    return {
        Verdict.SUPPORTED: ("the effect is there", "support it"),
        Verdict.TOO_SMALL: (f"the effect is there, and below {size}", f"show it to be there and below {size}"),
        Verdict.EXCLUDED: (f"an effect of {size} or more is excluded", f"exclude {size} or more"),
        Verdict.REVERSED: ("the effect has the other sign", "show the other sign"),
        Verdict.UNDECIDED: ("", ""),
    } | ({} if claim.direction else either_way)


def _seeds_at_any_effect(claim: Claim, numbers: Numbers, family: int) -> int | None:
    """Return the fewest seeds with an interval too narrow to hold both 0 and the smallest effect that matters.

    The level is the strictest by Holm in a family of `family` contrasts. None if `stats.MOST_SEEDS` are too few, for
    censored contrasts, and for claims of no difference, which have a border on each side.
    """
    if not claim.direction or numbers.censored:
        return None
    level = 1 - 2 * LEVEL / family

    def is_narrow_enough(seeds: int) -> bool:
        return 2 * stats.half_width(numbers.variances, seeds, numbers.questions, level) <= claim.margin

    return stats.fewest_seeds(is_narrow_enough, claim.file.seeds)
