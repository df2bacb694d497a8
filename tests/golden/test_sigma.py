"""sigma(step) against tables worked out by hand, and against the points of the paper's Fig. 15."""

import itertools

import pytest

from qerl_lab.aqn import level, stage
from qerl_lab.config.schema import READINGS, SCHEDULES, AqnConfig

NOISY = [schedule for schedule in SCHEDULES if schedule not in ("off", "adaptive")]

# sigma_start 0.08, sigma_end 0.01, four stages. The values of each stage from Eq. 8 and its analogues:
# exponential 0.08 (1/8)^share; linear 0.08 - 0.07 share; cosine 0.01 + 0.07 (1 + cos pi share) / 2;
# logarithmic 0.08 - 0.07 ln k / ln n. With ln 2 / ln 4 = 1/2, ln 3 / ln 4 = 0.79248125036, ln 2 / ln 3 = 0.63092975357.
ROOT_8TH = 0.35355339059  # sqrt(1 / 8)
STAGES = {
    # all four stages are noisy, share 0, 1/3, 2/3, 1
    ("exponential", "equation"): [0.08, 0.04, 0.02, 0.01],
    ("linear", "equation"): [0.08, 0.17 / 3, 0.10 / 3, 0.01],
    ("cosine", "equation"): [0.08, 0.0625, 0.0275, 0.01],
    ("logarithmic", "equation"): [0.08, 0.045, 0.08 - 0.07 * 0.79248125036, 0.01],
    # the first is clean, the other three run from start to end: share 0, 1/2, 1
    ("exponential", "released"): [0.0, 0.08, 0.08 * ROOT_8TH, 0.01],
    ("linear", "released"): [0.0, 0.08, 0.045, 0.01],
    ("cosine", "released"): [0.0, 0.08, 0.045, 0.01],
    ("logarithmic", "released"): [0.0, 0.08, 0.08 - 0.07 * 0.63092975357, 0.01],
    # the first is clean, and Eq. 8 counts it as a noisy stage: share 0, 1/3, 2/3
    ("exponential", "algorithm"): [0.0, 0.08, 0.04, 0.02],
    ("linear", "algorithm"): [0.0, 0.08, 0.17 / 3, 0.10 / 3],
    ("cosine", "algorithm"): [0.0, 0.08, 0.0625, 0.0275],
    ("logarithmic", "algorithm"): [0.0, 0.08, 0.045, 0.08 - 0.07 * 0.79248125036],
}

# Fig. 15 of the paper (arXiv 2510.11696 v1, appendix F), read off the plotted points by pixel, error up to 9e-4: stage
# k = 1..10, a = 5e-2. The exponential curve falls by 0.395 a stage, to about 1.2e-5; the others end at about 0.
FIG_15 = {
    "linear": {2: 0.0446, 3: 0.0390, 4: 0.0335, 5: 0.0272, 6: 0.0231, 7: 0.0168, 8: 0.0113, 9: 0.0057},
    "exponential": {2: 0.0198, 3: 0.0079, 4: 0.0031, 5: 0.0012, 6: 0.0005, 7: 0.0005, 8: 0.0002, 9: -0.0005},
    "cosine": {2: 0.0487, 3: 0.0442, 4: 0.0376, 5: 0.0294, 6: 0.0209, 7: 0.0127},
    "logarithmic": {
        1: 0.0502, 2: 0.0349, 3: 0.0265, 4: 0.0201, 5: 0.0153, 6: 0.0113, 7: 0.0079, 8: 0.0050, 9: 0.0024, 10: 0.0002,
    },
}  # fmt: skip


def config(schedule: str, reading: str = "equation", stages: int = 4, start: float = 0.08, end: float = 0.01):
    return AqnConfig(schedule=schedule, reading=reading, stages=stages, sigma_start=start, sigma_end=end)


def values(cfg: AqnConfig, total: int) -> list[float]:
    """Return sigma of the steps 1..total."""
    return [level(cfg, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize(("schedule", "reading"), list(itertools.product(NOISY, READINGS)))
def test_sigma_of_every_schedule_and_reading_equals_the_table(schedule: str, reading: str) -> None:
    assert (schedule, reading) in STAGES, "work its four stages out by hand"
    cfg, expected = config(schedule, reading), STAGES[schedule, reading]
    assert values(cfg, 4) == pytest.approx(expected, abs=1e-12)
    assert values(cfg, 8) == pytest.approx([value for value in expected for _ in range(2)], abs=1e-12)


@pytest.mark.parametrize(("schedule", "reading"), list(itertools.product(SCHEDULES, READINGS)))
def test_step_0_is_clean(schedule: str, reading: str) -> None:
    assert level(config(schedule, reading), 0, 8) == 0.0


@pytest.mark.parametrize("reading", READINGS)
def test_off_is_clean_at_every_step(reading: str) -> None:
    assert values(config("off", reading), 8) == [0.0] * 8


@pytest.mark.parametrize("schedule", NOISY)
def test_a_single_stage_has_sigma_start_or_is_clean(schedule: str) -> None:
    """Eq. 8 with K = 1 divides 0 by 0, so the stage gets sigma_start. The other readings keep it clean."""
    assert values(config(schedule, "equation", stages=1), 3) == [0.08] * 3
    assert values(config(schedule, "released", stages=1), 3) == [0.0] * 3
    assert values(config(schedule, "algorithm", stages=1), 3) == [0.0] * 3


@pytest.mark.parametrize("schedule", NOISY)
def test_a_single_noisy_stage_has_sigma_start(schedule: str) -> None:
    """The released code divides by zero with two stages."""
    assert values(config(schedule, "equation", stages=2), 4) == pytest.approx([0.08, 0.08, 0.01, 0.01])
    assert values(config(schedule, "released", stages=2), 4) == [0.0, 0.0, 0.08, 0.08]
    assert values(config(schedule, "algorithm", stages=2), 4) == [0.0, 0.0, 0.08, 0.08]


def test_more_stages_than_steps_skips_stages_evenly() -> None:
    assert [stage(step, 4, 10) for step in range(1, 5)] == [0, 2, 5, 7]
    linear = config("linear", stages=10, start=0.09, end=0.0)
    assert values(linear, 4) == pytest.approx([0.09, 0.07, 0.04, 0.02])  # 0.09 - 0.01 stage
    assert level(linear, 1, 1) == 0.09


def test_stages_differ_in_length_if_they_do_not_divide_the_steps() -> None:
    assert [stage(step, 7, 3) for step in range(1, 8)] == [0, 0, 0, 1, 1, 2, 2]
    assert values(config("linear", "released", stages=3, start=0.5, end=0.25), 7) == [0, 0, 0, 0.5, 0.5, 0.25, 0.25]


def test_stages_are_in_order_all_used_and_of_equal_size_within_one() -> None:
    for total, stages in itertools.product(range(1, 40), range(1, 14)):
        found = [stage(step, total, stages) for step in range(1, total + 1)]
        assert found == sorted(found)
        assert found[0] == 0
        assert found[-1] < stages
        if stages <= total:
            sizes = [found.count(number) for number in range(stages)]
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("schedule", "stages"), list(itertools.product(NOISY, (3, 4, 10))))
def test_released_ends_at_sigma_end_and_algorithm_ends_above(schedule: str, stages: int) -> None:
    """Algorithm 1 of the paper stops one stage short of the value that its text promises."""
    released = values(config(schedule, "released", stages), 50)
    algorithm = values(config(schedule, "algorithm", stages), 50)
    assert released[-1] == pytest.approx(0.01, rel=1e-12)
    assert min(value for value in algorithm if value > 0) > 0.0101
    for readings in (released, algorithm):
        noisy = [value for value in readings if value > 0]
        assert noisy[0] == 0.08
        assert noisy == sorted(noisy, reverse=True)
        assert readings == [0.0] * (50 - len(noisy)) + noisy  # clean steps come first only


@pytest.mark.parametrize("schedule", FIG_15)
def test_sigma_equals_the_points_of_figure_15(schedule: str) -> None:
    cfg = config(schedule, "equation", stages=10, start=5e-2, end=1.2e-5 if schedule == "exponential" else 0.0)
    assert {k: level(cfg, k, 10) for k in FIG_15[schedule]} == pytest.approx(FIG_15[schedule], abs=9e-4)
