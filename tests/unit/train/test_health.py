"""What a run's metrics say about it: silence over one that learns, one warning over each that does not."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from qerl_lab.config.schema import RolloutConfig, RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train.health import WINDOW, Watch

RECORD = Path(__file__).parents[2] / "data" / "record"
GOOD = {
    "reward/mean": 0.7, "reward/std": 0.5, "reward/zero_variance_groups": 0.1, "rollout/truncated_fraction": 0.0,
    "policy/entropy_nats": 0.3, "rollout/completion_tokens": 300.0, "reward/answer": 0.3,
}  # fmt: skip


def told(
    steps: Iterable[dict[str, float]], cfg: RunConfig | None = None, earlier: Iterable[dict[str, float]] = ()
) -> list[str]:
    """Sign and advice of every warning, in order."""
    watch = Watch(cfg or RunConfig(run_dir="runs/a b"), earlier)
    return [f"{sign}: {advice}" for metrics in steps for sign, advice in watch.add_step(metrics).items()]


@pytest.mark.parametrize("run", sorted(path.name for path in RECORD.iterdir()))
def test_a_run_that_learns_hears_nothing(run: str) -> None:
    lines = [line["metrics"] for line in RunDirectory(RECORD / run).metrics()]
    assert len(lines) > 20
    assert told(lines) == []


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0},
         ["no completion has earned anything", "python -m qerl_lab.tools.samples 'runs/a b'"]),
        ({"rollout/truncated_fraction": 1.0},
         ["cut at the token limit", "higher rollout.max_completion_tokens (it is 4096)"]),
        ({"reward/mean": 1.2, "reward/std": 0.0, "reward/zero_variance_groups": 1.0},
         ["every question earned the same", "rollout.group_size (it is 8)"]),
        ({"rollout/groups_flat": 2.0}, ["dynamic sampling fills no batch", "algorithm.max_resamples (it is 10)"]),
        ({"sampler/logprob_gap_max": 24.9},
         ["sampler and trainer are two policies", "25 nats apart", "Do not believe this run", "model.dtype=float32"]),
        ({"noise/sigma": 5e-4, "noise/std_observed": 3.2e-3}, ["another noise than was asked", "0.0005", "0.0032"]),
    ],
)  # fmt: skip
def test_a_sign_is_told_once_when_it_has_held_for_the_window(bad: dict[str, float], words: list[str]) -> None:
    assert told([GOOD | bad] * (WINDOW - 1)) == []
    assert told([GOOD | bad] * (WINDOW - 1) + [GOOD] + [GOOD | bad] * (WINDOW - 1)) == []
    (said,) = told([GOOD | bad] * 3 * WINDOW)
    assert all(word in said for word in words)
    if "sampler/logprob_gap_max" in bad:
        (said,) = told([GOOD | bad] * 3 * WINDOW, RunConfig(rollout=RolloutConfig(engine="vllm")))
        assert "rollout.vllm.linear_backend=marlin, or rollout=transformers" in said


@pytest.mark.parametrize("harmless", [
    {"sampler/logprob_gap_max": 24.9, "noise/sigma": 0.05}, {"sampler/logprob_gap_max": 0.9, "noise/sigma": 0.0},
    {"noise/sigma": 5e-4, "noise/std_observed": 5.9e-4},
])  # fmt: skip
def test_noise_and_rounding_may_part_sampler_and_trainer_a_little(harmless: dict[str, float]) -> None:
    assert told([GOOD | harmless] * 3 * WINDOW) == []


@pytest.mark.parametrize("gone", [
    {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0},
    {"reward/mean": 0.1, "reward/std": 0.2, "policy/entropy_nats": 5.0},
], ids=["worthless", "noise"])  # fmt: skip
def test_a_reward_that_is_gone_is_a_collapse_and_no_hopeless_task(gone: dict[str, float]) -> None:
    (said,) = told([GOOD] * 20 + [GOOD | gone] * 20)
    assert "the policy has collapsed" in said


def test_a_collapse_is_told_by_the_reward_and_by_the_entropy() -> None:
    """As with a learning rate that is far too high: no format, no answer, one token for ever."""
    said = told([GOOD] * WINDOW + [GOOD | {"reward/mean": 0.01, "reward/std": 0.1, "policy/entropy_nats": 0.005}] * 20)
    assert len(said) == 2
    assert any("entropy has collapsed" in one for one in said)
    assert any("reward was 0.70 as the run began and is 0.29. Type a lower optim.learning_rate" in one for one in said)


def test_a_hard_task_in_small_batches_has_not_collapsed_by_bad_luck() -> None:
    """0.1 and then 0 over 5 steps of 2 questions happens one time in three."""
    cfg = RunConfig()
    cfg.rollout.prompts_per_step = 2
    lucky = GOOD | {"reward/mean": 0.1, "reward/std": 0.3}
    unlucky = GOOD | {"reward/mean": 0.02, "reward/std": 0.14}
    assert told([lucky] * WINDOW + [unlucky] * 20, cfg) == []


def test_a_resumed_run_compares_with_its_beginning_and_does_not_repeat_itself() -> None:
    worthless = GOOD | {"reward/mean": 0.0, "reward/zero_variance_groups": 1.0}
    before = [{"eval/accuracy": 0.5}, *[worthless] * WINDOW]
    assert told([worthless] * WINDOW, earlier=before) == []
    low = GOOD | {"reward/mean": 0.1, "reward/std": 0.3}
    assert told([low] * WINDOW, earlier=[GOOD] * WINDOW)
    assert not told([low] * WINDOW)


@pytest.mark.parametrize(("right", "warns"), [(0.3, True), (0.6, False)])
def test_completions_that_shrink_while_right_answers_do_not_rise(right: float, warns: bool) -> None:
    """As on a 0.5B that learned to keep the format in 15 tokens."""
    shrunk = GOOD | {"rollout/completion_tokens": 90.0, "reward/answer": right}
    said = told([GOOD] * WINDOW + [shrunk] * 3 * WINDOW)
    assert ["task.format_reward_for=right" in one and "300 tokens" in one for one in said] == [True] * warns
