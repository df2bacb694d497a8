"""Verdicts on claims: error rates under a known truth, the arms that are compared, reasons and measures."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import t

from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import leaves
from qerl_lab.report.claims import Claim, Guardrail, of_paper
from qerl_lab.report.effects import find_pairs
from qerl_lab.report.measures import MEASURES, Unmeasured
from qerl_lab.report.runs import FINISHED, Origin, Run, run_from
from qerl_lab.report.stats import holm, p_above, variance_components
from qerl_lab.report.verdict_tables import paper_cell as of_paper_text
from qerl_lab.report.verdicts import PValues, Row, Verdict, floor_variances, set_verdicts
from simulated_runs import (
    BEST,
    BY_NAME,
    EQUAL,
    GRADED,
    NOISY,
    QUIET,
    RATES,
    SCALAR,
    arms,
    held_out_arms,
    record,
    shown,
    verdicts,
)

CLAIMS, LEARNING_RATE = of_paper(), "optim.learning_rate"

REPEATS = 100
LARGEST = 0.025 + 3 * math.sqrt(0.025 * 0.975 / REPEATS)  # three standard errors above the level


# --- error rates under a known truth, seeds and questions drawn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "effect", "wrong"),
    [("scalar", 0, {"supported", "too small to matter"}), ("scalar", 0.02, {"excluded", "too small to matter"}),
     ("scalar", 0, {"reversed"}), ("equal", 0.02, {"supported"}), ("equal", 0, {"excluded"}),
     ("graded", 0, {"supported", "too small to matter"}), ("graded", 0.05, {"excluded", "too small to matter"})],
)  # fmt: skip
def test_a_wrong_verdict_is_as_rare_as_stated(kind: str, effect: float, wrong: set[str]) -> None:
    assert np.mean([bool(found & wrong) for found in shown(kind, effect, REPEATS)]) <= LARGEST


@pytest.mark.slow
def test_equal_arms_at_their_best_learning_rates_are_told_apart_as_rarely_as_stated() -> None:
    """A single contrast shows a sign exactly if its 95% interval does not contain 0."""
    repeats, wrong = 150, {"supported", "too small to matter", "reversed"}
    share = np.mean([bool(found & wrong) for found in shown("best", 0, repeats)])
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "effect", "right", "power"),
    [("scalar", 0.02, "supported", 0.95), ("scalar", 0, "excluded", 0.95), ("scalar", -0.02, "reversed", 0.95),
     ("equal", 0, "supported", 0.95), ("equal", 0.04, "excluded", 0.9), ("graded", 0.08, "supported", 0.8)],
)  # fmt: skip
def test_a_true_effect_is_found_often_enough(kind: str, effect: float, right: str, power: float) -> None:
    assert np.mean([right in found for found in shown(kind, effect, 40, QUIET)]) >= power


def test_p_values_are_corrected_by_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # times 4, 3, 2, 1; never falling
    assert holm([0.6, 0.7]) == [1, 1]


def test_a_difference_outside_of_the_margin_is_tested_on_both_sides() -> None:
    """The claim is that two arms are equal. Either side may refute it, so that the smaller p-value counts twice."""
    treated = EQUAL.contrasts[0].treated
    for effect in (0.05, -0.05):
        numbers = verdicts(EQUAL, arms(EQUAL, {treated: effect}, 5, NOISY, np.random.default_rng(0)))[0].numbers
        beyond = p_above(abs(numbers.at_least.mean()), numbers.variances, numbers.seeds, 1, EQUAL.margin)
        assert 0 < beyond < 0.1
        assert numbers.p.small == pytest.approx(2 * beyond)


def test_the_best_learning_rate_of_a_seed_is_chosen_by_the_other_seeds() -> None:
    claim = replace(SCALAR, contrasts=SCALAR.contrasts[:1], best_of=LEARNING_RATE)
    contrast = claim.contrasts[0]

    def of(settings: dict[str, str], rate: str, seed: int, entropy: float) -> Run:
        return record(settings | {LEARNING_RATE: rate}, seed, entropy)

    runs = [
        of(dict(contrast.control_settings), rate, seed, 0.3 + seed / 100) for rate in ("1", "2") for seed in range(3)
    ]
    runs += [of(dict(contrast.treated_settings), "1", seed, 0.3 + seed / 100) for seed in range(3)]
    runs += [of(dict(contrast.treated_settings), "2", seed, (0.9, 0.2, 0.2)[seed]) for seed in range(3)]
    (row,) = verdicts(claim, runs)
    # Seed 0's luck at rate 2 does not count for seed 0. The other seeds see it and take rate 2.
    assert row.numbers.at_least[:, 0] == pytest.approx([0.0, 0.2 - 0.31, 0.2 - 0.32])
    (row,) = verdicts(replace(claim, direction=-1), runs)  # the lowest is best if the measure should fall
    assert row.numbers.at_least[:, 0] == pytest.approx([0.3 - 0.9, 0.0, 0.0])
    best = [of(dict(contrast.treated_settings), "3", seed, 1.0) for seed in range(3)]
    (row,) = verdicts(claim, runs + best)  # also at a rate that the other arm lacks
    assert row.numbers.at_least[:, 0] == pytest.approx([0.7, 0.69, 0.68])
    (row,) = verdicts(claim, [run for run in runs if run.value(LEARNING_RATE) == "1"])
    assert row.verdict == Verdict.UNDECIDED
    assert "has one value of optim.learning_rate" in row.why
    base = contrast.control_settings["format.name"]
    (row,) = verdicts(
        claim, [run for run in runs if run.value("format.name") != base or run.value(LEARNING_RATE) == "1"]
    )
    assert "has one value of optim.learning_rate" in row.why, "the other arm had no choice"


def test_a_seed_that_changes_the_choice_of_the_best_widens_the_interval() -> None:
    """The jackknife measures everything again without each seed, and chooses again, too."""
    contrast, at_rate = BEST.contrasts[0], {RATES[0]: (0.6, 0.1, 0.2), RATES[1]: (0.3, 0.3, 0.4)}
    runs = [
        record({**settings, LEARNING_RATE: rate}, seed, value if settings is contrast.treated_settings else 0.0)
        for settings in (contrast.treated_settings, contrast.control_settings)
        for rate, values in at_rate.items()
        for seed, value in enumerate(values)
    ]
    (row,) = verdicts(replace(BEST, guardrail=Guardrail("entropy_first", 0.1)), runs)
    assert row.numbers.at_least[:, 0] == pytest.approx([0.3, 0.1, 0.2])
    # Each of two seeds takes the rate that is better in the other: without seed 0 both take the second rate.
    without = [(0.3 + 0.4) / 2, (0.3 + 0.2) / 2, (0.3 + 0.1) / 2]
    variance = 2 / 3 * sum((mean - sum(without) / 3) ** 2 for mean in without)  # variance of the mean of three seeds
    assert row.numbers.variances[0] == pytest.approx(3 * variance)
    half = t.ppf(0.975, 2) * math.sqrt(variance)
    assert row.numbers.effect == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert row.numbers.treated == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    assert row.numbers.control == pytest.approx((0, 0, 0))
    assert row.numbers.guardrail == "open"  # by the seeds' own variance, 0.01, the interval would end above -0.1
    two = verdicts(replace(BEST, file=replace(BEST.file, seeds=2)), [run for run in runs if run.seed < 2])
    assert two[0].why == "seeds that both arms have: 2, of 3 that are needed"


def test_the_guardrail_is_measured_at_the_rate_that_is_best_for_the_claims_measure() -> None:
    """At its best learning rate for entropy the treated arm is less accurate. At the other rate it is not."""
    (contrast,), runs = BEST.contrasts, list[Run]()
    for rate, entropy, accuracy in ((RATES[0], 0.6, 0.2), (RATES[1], 0.4, 0.8)):
        treated, control = (
            settings | {LEARNING_RATE: rate} for settings in (contrast.treated_settings, contrast.control_settings)
        )
        for seed in range(3):
            runs.append(record(treated, seed, entropy, np.full(4, accuracy)))
            runs.append(record(control, seed, 0.3, np.full(4, 0.5)))
    (row,) = verdicts(replace(BEST, guardrail=Guardrail("accuracy_after", 0.02)), runs)
    assert row.numbers.guardrail == "broken"


# --- which arms are compared


def few(seeds: int = 4, effect: float = 0.1, claim: Claim = SCALAR) -> list[Run]:
    return arms(
        claim, {contrast.treated: effect for contrast in claim.contrasts}, seeds, 0.002, np.random.default_rng(1)
    )


def test_arms_that_also_differ_in_another_setting_are_not_compared() -> None:
    def moved(one: Run) -> Run:
        is_base = one.value("format.name") == "bf16"
        settings = one.settings | ({LEARNING_RATE: "0.1"} if is_base else {})
        return replace(one, settings=settings)

    rows = verdicts(SCALAR, [moved(one) for one in few()])
    assert {row.verdict for row in rows} == {Verdict.UNDECIDED}
    assert verdicts(replace(SCALAR, free=(*SCALAR.free, "optim")), [moved(one) for one in few()])[0].numbers
    no_group = replace(SCALAR, free=(*SCALAR.free, "optim.learning"))
    assert not verdicts(no_group, [moved(one) for one in few()])[0].numbers, "the beginning of a key frees no key"
    assert rows[0].why.startswith(
        "no two arms are equal but for what is compared: the nearest two differ in optim.lear"
    )
    both = verdicts(SCALAR, few() + [moved(one) for one in few() if one.value("format.name") == "bf16"])
    assert len(both) == 3  # the arm at another rate has no partner and no row
    farther = [
        replace(one, settings=one.settings | {"lora.rank": "64"})
        for one in map(moved, few())
        if one.value("format.name") == "bf16"
    ]
    (why,) = {row.why for row in verdicts(SCALAR, [*farther, *(moved(one) for one in few())])}
    assert why.endswith("the nearest two differ in optim.learning_rate")


def test_an_arm_without_a_finished_run_changes_no_verdict() -> None:
    """A finished arm at the same learning rate does not change this."""
    rows = verdicts(SCALAR, few())
    changes = {LEARNING_RATE: "0.1"}
    other = [replace(one, settings=one.settings | changes) for one in few()]
    stopped = [one if one.value("format.name") == "bf16" else replace(one, status="interrupted") for one in other]
    assert [row.verdict for row in verdicts(SCALAR, few() + stopped)] == [row.verdict for row in rows]
    started = [replace(one, status="interrupted") for one in few() if one.value("format.name") == "bf16"]
    assert all(row.lacks_runs for row in verdicts(SCALAR, started)), "the other arms have no run"


def test_rows_of_arms_at_their_best_learning_rates_name_no_rate() -> None:
    def of(rate: str, rank: str) -> list[Run]:
        own = {LEARNING_RATE: rate, "lora.rank": rank}
        return [replace(one, settings=one.settings | own) for one in few()]

    rates = {"16": ("0.1", "0.2"), "32": ("0.2", "0.3")}  # each rank has its own grid of rates
    made = [one for rank, own in rates.items() for rate in own for one in of(rate, rank)]
    rows = verdicts(replace(SCALAR, best_of=LEARNING_RATE), made)
    assert [row.context for row in rows[:2]] == [(("lora.rank", "16"),), (("lora.rank", "32"),)]


def test_one_run_that_was_made_for_other_claims_is_enough_for_a_verdict_to_be_not_preregistered() -> None:
    runs = [replace(run, origin=Origin(claims_sha256=SCALAR.file.sha256)) for run in few()]
    assert verdicts(SCALAR, runs)[0].registered == "preregistered: all 8 runs record this file's hash"
    row = verdicts(SCALAR, [replace(runs[0], origin=Origin(claims_sha256="of others")), *runs[1:]])[0]
    assert row.registered == "not preregistered: 7 of 8 runs record this file's hash"
    assert not row.is_registered


def test_only_shared_seeds_and_questions_count() -> None:
    made = held_out_arms(GRADED, 0.2, 4, np.random.default_rng(0))
    short = replace(made[0], accuracy={name: values.iloc[:100] for name, values in made[0].accuracy.items()})
    (row,) = verdicts(GRADED, [short, *made[1:-1]])  # the control's seed 3 is missing
    assert (row.numbers.seeds, row.numbers.questions, row.finished) == (3, 100, (4, 3))


# --- guardrails and the text of a verdict


def less_accurate(made: Run, lost: float) -> pd.Series:
    lost *= 1 + (made.seed - 1.5) / 10
    return made.accuracy["after"] + 0.5 - (lost if made.value("format.name") == "nvfp4" else 0)


def other_answers(made: Run, amount: float) -> pd.Series:
    """Return accuracies that differ between arms by `amount`, with alternating signs over questions and seeds."""
    values = made.accuracy["after"] * 0
    if made.value("format.name") != "nvfp4":
        return values
    return values + amount * (-1.0) ** (np.arange(len(values)) + made.seed)


def asked_others(made: Run, shared: int) -> pd.Series:
    """Rename all but `shared` questions of the treated arm, so that they have no pair; the claim's measure has."""
    values = made.accuracy["after"]
    if made.value("format.name") != "nvfp4":
        return values
    return values.rename(index=lambda name: name if name in values.index[:shared] else f"new {name}")


@pytest.mark.parametrize(("change", "amount", "state"), [
    (less_accurate, 0.0, "held"), (less_accurate, 0.1, "broken"), (less_accurate, 0.02, "open"),
    (other_answers, 0.01, "held"), (other_answers, 1.0, "open"), (asked_others, 0, "open"), (asked_others, 1, "open"),
])  # fmt: skip
def test_a_verdict_says_the_state_of_its_guardrail(
    change: Callable[[Run, float], pd.Series], amount: float, state: str
) -> None:
    railed = replace(SCALAR, guardrail=Guardrail("accuracy_after", 0.02), contrasts=SCALAR.contrasts[:1])
    (row,) = verdicts(railed, [replace(made, accuracy={"after": change(made, amount)}) for made in few(claim=railed)])
    assert (row.verdict, row.numbers.guardrail) == ("supported", state)
    assert (f"guardrail accuracy_after is {state}" in row.why) == (state != "held")


def test_a_contrast_is_tested_at_the_level_of_its_family() -> None:
    rows = verdicts(SCALAR, few())
    for p_values, supported in (((0.02, 0.02, 0.02), 0), ((0.008, 0.02, 0.02), 1), ((0.001, 0.012, 0.02), 3)):
        given = [
            replace(row, numbers=replace(row.numbers, p=PValues(p, 1.0, 1.0)))
            for row, p in zip(rows, p_values, strict=True)
        ]
        assert [row.verdict for row in set_verdicts(given)].count(Verdict.SUPPORTED) == supported


@pytest.mark.parametrize(("effect", "verdict"), [
    (0.1, "supported"), (0.008, "too small to matter"), (0.0, "excluded"), (-0.1, "reversed"),
])  # fmt: skip
def test_a_verdict_says_whether_an_effect_matters_is_too_small_is_absent_or_reversed(
    effect: float, verdict: str
) -> None:
    assert verdicts(SCALAR, few(8, effect=effect))[0].verdict == verdict


@pytest.mark.parametrize(("direction", "smallest", "cannot"), [(1, 0.05, True), (1, 0.02, False), (-1, 0.02, True)])
def test_an_effect_smaller_than_the_smallest_that_matters_cannot_contradict_the_paper(
    direction: int, smallest: float, cannot: bool
) -> None:
    """The paper has +0.034 for this contrast: no rise of 0.05, and no fall."""
    row = verdicts(replace(SCALAR, direction=direction, smallest=smallest), few(8, effect=0.0))[0]
    assert row.verdict == "excluded"
    assert ("cannot contradict the paper's +0.034 (Figure 5 7B, +-0.004)" in row.why) == cannot


def test_a_row_says_whether_its_interval_holds_the_papers_value() -> None:
    for effect, said in ((0.1, "outside"), (-0.1, "outside"), (0.035, "inside")):
        assert of_paper_text(verdicts(SCALAR, few(8, effect=effect))[0]) == f"+0.034 (Figure 5 7B, +-0.004, {said})"


def test_seeds_without_any_spread_are_judged_by_their_number() -> None:
    assert p_above(0.1, (0.0, 0.0), 5, 1) == 2**-5
    assert p_above(0.1, (0.0, 0.0), 5, 1, null=0.1) == 1.0


# --- the claims themselves


@pytest.mark.parametrize("grid", sorted({claim.sweep for claim in CLAIMS}))
def test_a_grid_makes_the_arms_of_its_claims(grid: str) -> None:
    words = [word.replace("experiment=", "+experiment=") for word in grid.split()[1:]]  # as the command line reads it
    plan = make_plan([f"+sweeps={grid.split()[0]}", *words, "seed=0"], False)
    runs = []
    for job in plan.jobs:
        values = {name: str(value) for name, _, value in leaves(job.config)}
        metrics = [] if job.config.scale == "pocket" else ["memory/gpu_peak_gib"]  # a metric of GPUs only
        runs.append(run_from(values, name=str(job.number), status=FINISHED, ended=0, code="", metrics=metrics))
    for claim in (claim for claim in CLAIMS if claim.sweep == grid):
        for contrast in claim.contrasts:
            (pair,) = find_pairs(claim, contrast, runs)
            assert len(pair.treated.finished) == len(pair.control.finished) == (3 if claim.swept_key else 1)


# --- measures


def curve(experiment: str, seed: int, shares: list[float]) -> Run:
    """Return a run with these shares of right answers, step by step."""
    own = {"format.name": experiment, "aqn.schedule": "off"}
    steps = pd.DataFrame({"reward/answer": shares}, index=range(1, len(shares) + 1))
    return replace(record(own, seed, 0.3), steps=steps)


def test_measures_of_a_curve() -> None:
    slow, fast, flat = (
        curve(name, seed, [rise * step for step in range(1, 5)])
        for name, seed, rise in (("bf16", 0, 0.1), ("nvfp4", 0, 0.2), ("nvfp4", 1, 0.0))
    )
    assert MEASURES["answers_mean"].of([slow], [slow]).loc[0, "run"] == pytest.approx(0.25)
    paid_double = replace(slow, settings=slow.settings | {"task.answer_reward": "2.0"})
    assert MEASURES["answers_mean"].of([paid_double], []).loc[0, "run"] == pytest.approx(0.125)
    assert MEASURES["answers_last"].of([fast], [slow]).loc[0, "run"] == pytest.approx(0.8)
    steps = MEASURES["steps_to_half"].of
    assert [steps([run], [slow]).loc[0, "run"] for run in (slow, fast)] == [3, 2]  # half of the slow one's rise is 0.25
    assert steps([flat], [slow]).loc[1, "run"] == 5  # never reached: one more than its steps
    gain = MEASURES["answers_gain"].of
    assert [gain([run], [slow]).loc[0, "run"] for run in (slow, fast)] == pytest.approx([0.3, 0.6])
    with pytest.raises(Unmeasured, match="no rise to be half of"):
        steps([slow], [flat])
    with pytest.raises(Unmeasured, match=r"went from 0\.400 to 0\.100: no rise"):
        steps([slow], [curve("bf16", 0, [0.4, 0.3, 0.2, 0.1])])
    evaluated = replace(slow, steps=slow.steps.reindex(range(5)))  # a row of step 0, before training
    for name in ("answers_mean", "answers_last", "answers_gain"):
        assert MEASURES[name].of([evaluated], []).equals(MEASURES[name].of([slow], []))
    worse = replace(flat, settings=slow.settings | {"optim.learning_rate": "0.1"})
    assert steps([slow], [slow, worse, worse]).loc[0, "run"] == 3  # the rise is measured at the control's best rate


@pytest.mark.parametrize("entropy", [math.nan, math.inf])
def test_a_measure_that_is_not_finite_is_refused(entropy: float) -> None:
    with pytest.raises(Unmeasured, match="not finite"):
        MEASURES["entropy_first"].of([record({}, 0, 0.3), record({}, 1, entropy)], [])


def test_a_measure_that_a_run_has_not_recorded_is_refused_by_name() -> None:
    older = replace(record({}, 1, 0.3), steps=pd.DataFrame({"reward/mean": [0.5]}, index=[1]))
    with pytest.raises(Unmeasured, match="reports have no 'reward/answer' of a run"):
        MEASURES["answers_mean"].of([record({}, 0, 0.3), older], [])


def test_accuracy_is_not_measured_if_one_run_of_an_arm_was_not_evaluated() -> None:
    runs = [record({}, 0, 0.3), replace(record({}, 1, 0.3), accuracy={})]
    with pytest.raises(Unmeasured, match="runs without held-out evaluation"):
        MEASURES["accuracy_after"].of(runs, [])


def test_one_lucky_first_batch_does_not_reach_half_of_the_rise() -> None:
    """Only whole windows count. Here a window is two of 20 steps."""
    rising = [0.1 * step for step in range(20)]
    lucky = [1.7, *rising[1:]]
    steps = MEASURES["steps_to_half"].of([curve("bf16", 0, lucky)], [curve("bf16", 0, rising)])
    assert steps.loc[0, "run"] == 11  # the mean of steps 10 and 11 is 0.95, half of the way


def steps_claim(treated: list[int], control: list[int]) -> Row:
    """Return growth_steps' row for NVFP4. Each seed goes from 0 to 1 after the given number of 10 steps; 10: never.

    One more run of the control rises, so that all other runs of the control may be ones that never do.
    """
    claim = replace(BY_NAME["growth_steps"], contrasts=BY_NAME["growth_steps"].contrasts[:1], guardrail=None)

    def of(name: str, steps: list[int]) -> list[Run]:
        return [curve(name, seed, [0.0] * n + [1.0] * (10 - n)) for seed, n in enumerate(steps)]

    rise = curve("bf16", 99, [0.0] * 5 + [1.0] * 5)
    return verdicts(claim, [*of("nvfp4", treated), *of("bf16", control), rise])[0]


def test_a_run_that_never_reaches_half_of_the_rise_is_a_bound_and_not_a_number() -> None:
    exact = [1, 2, 1, 2, 1]
    assert steps_claim([9] * 5, exact).numbers.censored == 0  # reached in the last step
    never = steps_claim([10] * 5, exact).numbers
    assert (never.censored, never.effect[2]) == (5, math.inf)
    assert never.effect[1] > 1
    assert never.p.below < 0.025  # at least so much slower
    assert never.p.above == 1
    faster = steps_claim(exact, [10] * 5)
    assert faster.verdict == "supported"
    assert faster.numbers.effect[1] == -math.inf
    assert faster.numbers.p.small == faster.numbers.p.below == 1
    both = steps_claim([10, *exact[1:]], [10, *exact[1:]]).numbers  # nothing is known of the first seed
    assert both.p == (1, 1, 1)
    assert both.effect[1:] == (-math.inf, math.inf)


def test_an_effect_is_averaged_over_the_learning_rates_that_both_arms_have() -> None:
    claim = replace(SCALAR, contrasts=SCALAR.contrasts[:1], mean_over=LEARNING_RATE)
    contrast = claim.contrasts[0]
    runs = [
        record(dict(settings) | {LEARNING_RATE: rate}, seed, 0.3 + effect * factor * (1 + seed))
        for settings, effect in ((contrast.treated_settings, 0.1), (contrast.control_settings, 0.0))
        for rate, factor in (("1", 1), ("2", 3), *((("3", 9),) if effect else ()))
        for seed in range(3)
    ]
    unfinished = replace(record(dict(contrast.control_settings) | {LEARNING_RATE: "3"}, 0, 0.3), status="interrupted")
    row = verdicts(claim, [*runs, unfinished])[0]
    assert row.numbers.at_least[:, 0] == pytest.approx([0.2, 0.4, 0.6])  # the mean of 0.1 and 0.3, times 1 + seed
    assert dict(row.conditions)[LEARNING_RATE] == "mean over 1, 2"
    single = verdicts(claim, [run for run in runs if run.value(LEARNING_RATE) == "1"])[0]
    assert single.why == "the arms share no two values of optim.learning_rate to take the mean over"
    apart = [run for run in runs if run.value(LEARNING_RATE) == ("1" if run.value("format.name") == "bf16" else "2")]
    assert verdicts(claim, apart)[0].why == single.why


def test_seeds_that_agree_by_luck_decide_nothing() -> None:
    """The means of the seeds agree better than the answers allow, and better than the means of the other contrasts."""
    claim = replace(GRADED, contrasts=GRADED.contrasts * 2)
    rows = verdicts(claim, held_out_arms(GRADED, 0.05, 4, np.random.default_rng(0)))
    numbers = rows[0].numbers
    values = numbers.at_least
    alike = values - (values.mean(1)[:, None] - values.mean())  # all seeds have the same mean
    assert variance_components(alike)[0] < 1e-20 < variance_components(alike, floored=True)[0]
    lucky = replace(rows[0], numbers=replace(numbers, variances=variance_components(alike, floored=True)))
    noisy, wild = (replace(rows[1], numbers=replace(numbers, variances=(of_seeds, 0.0))) for of_seeds in (0.04, 0.4))
    found = [row.numbers.variances[0] for row in floor_variances([lucky, noisy, wild])]
    assert found == pytest.approx([0.04, 0.04, 0.4], abs=1e-3), "a median, which one wild contrast does not raise"


def test_a_question_is_passed_if_one_sample_is_right() -> None:
    found = record({}, 0, 0.3, np.array([0.0, 0.5, 1.0, 0.5]))
    assert MEASURES["pass_after"].of([found], [found]).loc[0].tolist() == [0, 1, 1, 1]
    single = replace(found, settings=found.settings | {"eval.samples": "1"})
    with pytest.raises(Unmeasured, match="one sample a question"):
        MEASURES["pass_after"].of([single], [single])


def test_a_question_that_a_seed_was_not_asked_is_missing_and_not_failed() -> None:
    found = [record({}, seed, 0.3, np.ones(questions)) for seed, questions in ((0, 2), (1, 3))]
    assert MEASURES["pass_after"].of(found, found).isna().sum(axis=1).tolist() == [1, 0]


@pytest.mark.parametrize("measure", ["rollout_throughput", "step_throughput"])
def test_throughput_of_runs_beside_others_decides_nothing(measure: str) -> None:
    """Jobs that share a card or the cores of a machine slow each other."""
    alone = replace(
        record({"device": "cuda"}, 0, 0.3), summary={"rollout_tokens_per_second": 100.0, "tokens_per_second": 50.0}
    )
    assert MEASURES[measure].of([alone], [alone]).to_numpy() > 0
    for sides in ([alone], [replace(alone, at_once=2)]), ([replace(alone, at_once=2)], [alone]):
        with pytest.raises(Unmeasured, match=r"ran beside others.*type jobs=1"):
            MEASURES[measure].of(*sides)
