"""Find the arms that a contrast (treated against control) compares, and measure the effect by seed and question.

Pure: nothing is read or written.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
import pandas as pd

from qerl_lab.report import stats
from qerl_lab.report.claims import Claim, Contrast, Settings
from qerl_lab.report.measures import MEASURES, Unmeasured, Values
from qerl_lab.report.runs import Arm, Run

HELD, BROKEN, OPEN = "held", "broken", "open"
INTERVAL_SEEDS = 3  # from this many seeds on there is an interval; a verdict may need more (`ClaimsFile.seeds`)


class NoRuns(Unmeasured):
    """A contrast cannot be measured, because one of its arms has no run at all; the text names the arm."""


@dataclass(frozen=True)
class Side:
    """One side of a contrast, the treated or the control arm, at each value of the claim's `swept_key`.

    `started` maps each value of this key, such as a learning rate, to runs: the newest finished run of each seed, and
    all unfinished runs. If the claim has no swept key, the only value is "".
    """

    started: Mapping[str, Sequence[Run]]

    @property
    def finished(self) -> dict[str, list[Run]]:
        """Map each value of the swept key to its finished runs; leave out values without one."""
        by_value = {value: [run for run in runs if run.is_finished] for value, runs in self.started.items()}
        return {value: runs for value, runs in by_value.items() if runs}

    @property
    def runs(self) -> list[Run]:
        """Return the finished runs at all values of the swept key."""
        return [run for runs in self.finished.values() for run in runs]

    @property
    def seeds(self) -> set[int]:
        """Return the seeds that have a run at every value of the swept key."""
        return set.intersection(*({run.seed for run in runs} for runs in self.finished.values()))


class Pair(NamedTuple):
    """The two sides of a contrast, which share the settings `context`.

    Apart from the contrast's settings only the claim's `free` keys and swept key may differ.
    """

    treated: Side
    control: Side
    context: Arm


def find_pairs(claim: Claim, contrast: Contrast, started: Sequence[Run]) -> list[Pair]:
    """Return every pair of arms that tests a contrast; an arm may be in several.

    With `mean_over` both sides are limited to the values of this key that they share, if there are any. `started` holds
    the newest finished run of each arm and seed, and unfinished runs, which are only counted. Raises Unmeasured, with
    the reason, if there is no pair, and NoRuns if one of the arms has no run at all.
    """
    treated_runs = _runs_with(claim, contrast.treated_settings, started)
    control_runs = _runs_with(claim, contrast.control_settings, started)
    by_name = ((contrast.treated, treated_runs), (contrast.control, control_runs))
    if lacking := {name: len(runs) for name, runs in by_name if not any(run.is_finished for run in runs)}:
        reason = "no finished run of " + " and of ".join(f"{name} ({count} started)" for name, count in lacking.items())
        raise Unmeasured(reason) if all(lacking.values()) else NoRuns(reason)
    pairs, differences = list[Pair](), list[set[str]]()  # differences: the keys in which two sides differ
    candidates = product(_group_into_sides(claim, treated_runs), _group_into_sides(claim, control_runs))
    for (context, treated), (other_context, control) in candidates:
        if context != other_context:
            differences.append({key for key, _ in {*context} ^ {*other_context}})
            continue
        shared = treated.finished.keys() & control.finished.keys()
        if claim.mean_over and shared:
            treated, control = (
                Side({value: runs for value, runs in side.started.items() if value in shared})
                for side in (treated, control)
            )
        pairs.append(Pair(treated, control, context))
    if not pairs:
        nearest = min(differences, key=len)
        problem = "no two arms are equal but for what is compared: the nearest two differ in"
        raise Unmeasured(f"{problem} {', '.join(sorted(nearest))}")
    return pairs


def _runs_with(claim: Claim, settings: Settings, started: Sequence[Run]) -> list[Run]:
    """Return the runs with an arm's `settings` and under the conditions of the claim's file."""
    wanted = {*settings.items(), *claim.file.conditions.items()}
    return [run for run in started if wanted <= run.settings.items()]


def _group_into_sides(claim: Claim, runs: Sequence[Run]) -> list[tuple[Arm, Side]]:
    """Group runs into sides by all settings but the swept key; leave out sides without a finished run.

    Returns (context, side): the two sides of a `Pair` have equal contexts.
    """
    grouped: dict[Arm, dict[str, list[Run]]] = {}  # settings without the swept key -> its value -> runs
    for run in runs:
        value = run.value(claim.swept_key) if claim.swept_key else ""
        others = tuple(item for item in run.arm if item[0] != claim.swept_key)
        grouped.setdefault(others, {}).setdefault(value, []).append(run)
    sides = [(others, Side(by_value)) for others, by_value in grouped.items()]
    return [(tuple(item for item in others if not claim.is_free(item[0])), side) for others, side in sides if side.runs]


class Measured(NamedTuple):
    """A measure on one side of a pair: `values` [seeds, questions], as logarithms for a ratio.

    Of a seed in `is_censored` [seeds] only a lower bound is known, and `values` has it.

    `without` is set if the seeds' values depend on each other, as with `best_of`. It has a row per seed: the mean
    values of the other seeds, measured as if this seed did not exist.
    """

    values: Values
    is_censored: np.ndarray
    without: Values | None = None

    @property
    def jackknife(self) -> float:
        """Return the variance of the seeds' means by the jackknife (`stats.jackknife`); 0 if the seeds are independent.

        They are independent if `without` is not set.
        """
        return 0.0 if self.without is None else stats.jackknife(self.without.to_numpy(float).mean(1))


class PValues(NamedTuple):
    """One-sided p-values of the hypotheses that a verdict can reject."""

    above: float  # H0: no effect, or one of the other sign
    small: float  # H0: an effect of the smallest size that matters, or larger
    below: float  # H0: no effect, or one of the claimed sign


NOTHING_SHOWN = PValues(1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Numbers:
    """The measurements of one contrast.

    If seeds are censored, only bounds of their values are known. Means then take the values at their lower bound, and
    an interval is infinite on the side that is unknown.
    """

    seeds: int
    questions: int
    censored: int  # seeds
    treated: stats.Interval
    control: stats.Interval
    effect: stats.Interval  # the paired difference, for a ratio the factor
    # Bounds of the effect [seeds, questions], equal unless a value is censored; positive where the claim holds.
    at_least: np.ndarray
    at_most: np.ndarray
    variances: tuple[float, float]  # of seeds' means (`verdicts.floor_variances` raises it), and of questions
    jackknife: float  # lower bound for the variance of seeds' means; above 0 if seeds depend on each other (`best_of`)
    guardrail: str  # `HELD`, `BROKEN` or `OPEN`; empty without one
    p: PValues = NOTHING_SHOWN
    adjusted: PValues = NOTHING_SHOWN  # corrected (Holm)


def measure_pair(claim: Claim, pair: Pair) -> Numbers:
    """Measure the effect of a pair of arms over the seeds that both have; `verdicts.floor_variances` adds the p-values.

    Raises Unmeasured for too few shared seeds, questions or values of the swept key, and if runs lack the measure.
    """
    treated_values, control_values = pair.treated.finished.keys(), pair.control.finished.keys()  # of the swept key
    seeds, needed = sorted(pair.treated.seeds & pair.control.seeds), claim.file.seeds
    if claim.best_of:  # even without one seed (`Measured.without`), each of the others needs a seed that chooses for it
        needed = max(needed, INTERVAL_SEEDS)
    if claim.mean_over and len(treated_values & control_values) < 2:
        raise Unmeasured(f"the arms share no two values of {claim.mean_over} to take the mean over")
    if len(seeds) < min(needed, INTERVAL_SEEDS):
        raise Unmeasured(f"seeds that both arms have: {len(seeds)}, of {needed} that are needed")
    if claim.best_of and min(len(treated_values), len(control_values)) < 2:
        raise Unmeasured(f"an arm has one value of {claim.best_of}, so there is no best")
    treated, control, effect = _measure_effect(claim, claim.measure, pair, seeds)
    effect_S_Q = effect.values.to_numpy(float)
    least = np.where(control.is_censored[:, None], -np.inf, effect_S_Q)  # the control's true value may be any larger
    most = np.where(treated.is_censored[:, None], np.inf, effect_S_Q)
    at_least, at_most = (-most, -least) if claim.direction < 0 else (least, most)
    has_end = not control.is_censored.any(), not treated.is_censored.any()  # low and high end of the effect's interval
    return Numbers(
        seeds=len(seeds), questions=effect_S_Q.shape[1], censored=int(effect.is_censored.sum()),
        treated=_interval(claim, treated, (True, has_end[1])), control=_interval(claim, control, (True, has_end[0])),
        effect=_interval(claim, effect, has_end), at_least=at_least, at_most=at_most,
        variances=stats.variance_components(effect_S_Q, floored=True), jackknife=effect.jackknife,
        guardrail=_test_guardrail(claim, pair, seeds),
    )  # fmt: skip


def _interval(claim: Claim, measured: Measured, has_end: tuple[bool, bool]) -> stats.Interval:
    """Return the mean of `measured` over seeds and questions, and the low and high end of its 95% interval.

    For a ratio all three are factors; `measured` has their logarithms. The low or high end is infinite if `has_end` is
    false for it, because a value is censored. The variance of seeds' means is at least `measured.jackknife`.
    """
    mean, low, high = stats.over_seeds(measured.values, least=measured.jackknife)
    has_low, has_high = has_end
    if not has_low:
        low = -math.inf
    if not has_high:
        high = math.inf
    if not claim.is_ratio:
        return mean, low, high
    return math.exp(mean), math.exp(low) if math.isfinite(low) else low, math.exp(high)


def _measure_effect(
    claim: Claim, measure: str, pair: Pair, seeds: Sequence[int]
) -> tuple[Measured, Measured, Measured]:  # fmt: skip
    """Measure both sides of a pair on the questions that both were asked; return treated, control and the difference.

    Raises Unmeasured if the runs lack the measure, or were asked too few of the same questions.
    """
    controls = pair.control.runs
    treated, control = (_measure_side(claim, measure, side, controls, seeds) for side in (pair.treated, pair.control))
    shared = sorted(set(treated.values.columns) & set(control.values.columns))
    if not shared or (len(shared) == 1 and treated.values.shape[1] > 1):
        raise Unmeasured("the two arms were asked fewer than two of the same questions")
    treated, control = (
        Measured(side.values[shared], side.is_censored, None if side.without is None else side.without[shared])
        for side in (treated, control)
    )
    without = None if treated.without is None or control.without is None else treated.without - control.without
    is_censored = treated.is_censored | control.is_censored
    return treated, control, Measured(treated.values - control.values, is_censored, without)


def _measure_side(
    claim: Claim, measure: str, side: Side, controls: Sequence[Run], seeds: Sequence[int]
) -> Measured:  # fmt: skip
    """Return `measure` on one side of a pair, for the given seeds.

    `controls` are the runs of the control side, which some measures need. If the claim has a swept key, such as a
    learning rate, each value of this key is an option:

    - `mean_over` takes the mean over the options.
    - `best_of` takes for each seed the option that was best over the other seeds. No seed chooses for itself, so an arm
      cannot win by the luck that chose its option. Best is by `claim.measure`, also if `measure` is the guardrail's.
      Any two seeds have most of the choosing seeds in common, so their values depend on each other: `Measured.without`
      is set.
    """
    options = [_measure_option(measure, runs, controls, seeds) for runs in side.finished.values()]
    columns = [column for column in options[0].values.columns if all(column in option.values for option in options)]
    values = np.array([option.values[columns].to_numpy(float) for option in options])  # [options, seeds, questions]
    is_censored = np.array([option.is_censored for option in options])  # [options, seeds]
    if claim.mean_over or len(options) == 1:
        return Measured(pd.DataFrame(values.mean(0), list(seeds), columns), np.any(is_censored, axis=0))
    ranked = [_measure_option(claim.measure, runs, controls, seeds) for runs in side.finished.values()]
    better = [(claim.direction or 1) * option.values.mean(axis=1).to_numpy() for option in ranked]
    places = range(len(seeds))

    def choose(places: Sequence[int]) -> list[int]:
        """Return for each place (index into `seeds`) the index of the option that is best at the other places."""
        return [int(np.argmax([scores[rest].mean() for scores in better])) for rest in _without_each(places)]

    chosen = choose(places)
    without = np.array([values[choose(rest), rest].mean(0) for rest in _without_each(places)])
    best, without_each = (pd.DataFrame(own, list(seeds), columns) for own in (values[chosen, places], without))
    return Measured(best, is_censored[chosen, places], without_each)


def _measure_option(measure: str, runs: Sequence[Run], controls: Sequence[Run], seeds: Sequence[int]) -> Measured:
    """Measure the runs at one value of the swept key, such as one learning rate; a row for each of `seeds`.

    `controls` are the runs of the control side, which some measures need.
    """
    definition = MEASURES[measure]
    values = definition.of(runs, controls).dropna(axis=1).loc[list(seeds)]
    most = definition.most(runs[0]) if definition.most else math.inf
    is_censored = (values > most).any(axis=1).to_numpy()
    return Measured(np.log(values) if definition.is_ratio else values, is_censored)


def _without_each(places: Sequence[int]) -> list[list[int]]:
    """Return for each of `places` the list of all others, as in leave-one-out."""
    return [[other for other in places if other != place] for place in places]


def _test_guardrail(claim: Claim, pair: Pair, seeds: Sequence[int]) -> str:
    """Return `HELD`, `BROKEN` or `OPEN` for the claim's guardrail; an empty string if the claim has none.

    `HELD` if the 95% interval of treated minus control is above -margin, `BROKEN` if it is below -margin, else `OPEN`.
    Also `OPEN` if the runs lack the measure, or were asked too few of the same questions.
    """
    if claim.guardrail is None:
        return ""
    measure, margin = claim.guardrail.measure, claim.guardrail.margin
    try:
        *_, effect = _measure_effect(claim, measure, pair, seeds)
    except Unmeasured:
        return OPEN
    of_seeds, _ = stats.variance_components(effect.values, floored=True)
    _, low, high = stats.over_seeds(effect.values, least=max(of_seeds, effect.jackknife))
    if low > -margin:
        return HELD
    return BROKEN if high < -margin else OPEN
