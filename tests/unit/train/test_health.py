"""A run that learns gets no warning; each sign of trouble gives one."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from qerl_lab.config.schema import RolloutConfig, RunConfig, VllmConfig, VllmServerConfig
from qerl_lab.config.task import TaskConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking.tracker import Tracker
from qerl_lab.train.health import WINDOW, Watch
from qerl_lab.train.run import record_steps
from run_directories import claimed

RECORD = Path(__file__).parents[2] / "data" / "record"
GOOD = {
    "reward/mean": 0.7, "reward/std": 0.5, "reward/zero_variance_groups": 0.1, "rollout/truncated_fraction": 0.0,
    "policy/entropy_nats": 0.3, "rollout/completion_tokens": 300.0, "reward/answer": 0.3,
}  # fmt: skip
WORTHLESS = {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_variance_groups": 1.0}


def told(
    steps: Iterable[dict[str, float]], cfg: RunConfig | None = None, earlier: Iterable[dict[str, float]] = ()
) -> list[str]:
    """Return sign and advice of every warning, in order."""
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
        (WORTHLESS, ["no completion has earned anything", "python -m qerl_lab.tools.samples 'runs/a b'"]),
        ({"rollout/truncated_fraction": 1.0},
         ["cut at the token limit", "higher rollout.max_completion_tokens (it is 4096)"]),
        (WORTHLESS | {"reward/mean": 1.2, "rollout/groups_flat": 2.0},
         ["every question earned the same", "rollout.group_size (it is 8)"]),
        ({"rollout/groups_flat": 2.0}, ["dynamic sampling fills no batch", "algorithm.max_resamples (it is 10)"]),
        ({"sampler/logprob_gap_max": 24.9},
         ["sampler and trainer are two policies", "25 nats apart", "Do not believe this run", "model.dtype=float32"]),
        ({"noise/sigma": 5e-4, "noise/std_observed": 6.1e-4}, ["another noise than was asked", "0.0005", "0.00061"]),
        ({"noise/sigma": 5e-4, "noise/std_observed": 0.0}, ["another noise than was asked", "0.0005", "by 0."]),
    ],
)  # fmt: skip
def test_a_sign_is_told_once_when_it_has_held_for_the_window(bad: dict[str, float], words: list[str]) -> None:
    assert told([GOOD | bad] * (WINDOW - 1)) == []
    assert told([GOOD | bad] * (WINDOW - 1) + [GOOD] + [GOOD | bad] * (WINDOW - 1)) == []
    (said,) = told([GOOD | bad] * 3 * WINDOW)
    assert all(word in said for word in words)
    if "sampler/logprob_gap_max" in bad:
        (said,) = told([GOOD | bad] * 3 * WINDOW, RunConfig(rollout=RolloutConfig(engine="vllm")))
        assert "Type rollout.vllm.linear_backend=marlin, or rollout=transformers" in said
        server = RolloutConfig(engine="vllm_server", vllm_server=VllmServerConfig(overlap=True))
        (said,) = told([GOOD | bad] * 3 * WINDOW, RunConfig(rollout=server))
        assert "Type rollout.vllm_server.overlap=false, rollout.vllm.linear_backend=marlin, or" in said
        eight_bits = RolloutConfig(engine="vllm", vllm=VllmConfig(dense_dtype="fp8", dense_rows=192))
        (said,) = told([GOOD | bad] * 3 * WINDOW, RunConfig(rollout=eight_bits))
        assert "Type rollout.vllm.dense_dtype=auto, rollout.vllm.linear_backend=marlin, or" in said


@pytest.mark.parametrize("harmless", [
    {"sampler/logprob_gap_max": 24.9, "noise/sigma": 0.05}, {"sampler/logprob_gap_max": 0.9, "noise/sigma": 0.0},
    {"noise/sigma": 5e-4, "noise/std_observed": 5.9e-4},
])  # fmt: skip
def test_noise_and_rounding_may_part_sampler_and_trainer_a_little(harmless: dict[str, float]) -> None:
    assert told([GOOD | harmless] * 3 * WINDOW) == []


NOISE = {"reward/mean": 0.1, "reward/std": 0.2, "policy/entropy_nats": 5.0}
ONE_TOKEN = {"reward/mean": 0.01, "reward/std": 0.1, "policy/entropy_nats": 0.005}  # a learning rate far too high
HARD, UNLUCKY = {"reward/mean": 0.1, "reward/std": 0.3}, {"reward/mean": 0.02, "reward/std": 0.14}
SHORT = {"rollout/completion_tokens": 90.0}  # as of a 0.5B that learned to keep the format in 15 tokens
GONE = "the policy has collapsed: The reward was 0.70 as the run began and is"


@pytest.mark.parametrize(("early", "late", "words"), [
    ({}, WORTHLESS, [f"{GONE} 0.28."]),
    ({}, NOISE, [f"{GONE} 0.34."]),
    ({}, ONE_TOKEN, [f"{GONE} 0.29. Type a lower optim.learning_rate", "entropy has collapsed"]),
    (HARD, UNLUCKY, []),  # over 5 steps of 2 questions this happens one time in three
    ({}, SHORT, ["300 tokens as the run began and has 90; .* type task.format_reward_for=right"]),
    ({}, SHORT | {"reward/answer": 0.6}, []),
    ({}, {"policy/entropy_nats": 0.03, "reward/zero_variance_groups": 0.95}, []),
], ids=["worthless", "noise", "one token", "bad luck", "short", "short and right", "sure"])  # fmt: skip
def test_what_a_run_lost_since_it_began_is_told(early: dict, late: dict, words: list[str]) -> None:
    cfg = RunConfig(rollout=RolloutConfig(prompts_per_step=2 if early == HARD else 16))
    said = told([GOOD | early] * WINDOW + [GOOD | late] * 20, cfg)
    assert all(re.search(word, one) for word, one in zip(words, said, strict=True))


@pytest.mark.parametrize(
    ("task", "began", "now", "names_the_format"),
    [
        ({"answer_reward": 0.0}, 0.0, 0.0, []),  # nobody asked for right answers
        ({"answer_reward": 0.5}, 0.3, 0.36, []),  # right are 72% instead of 60%
        ({"answer_reward": 0.5}, 0.3, 0.32, [True]),
        ({}, 1.0000001, 1.0000001, [True]),  # all are right; a mean of float32 is above 1
        ({"format_reward": 0.0}, 0.3, 0.3, [False]),
        ({"format_reward_for": "right"}, 0.3, 0.3, [False]),
    ],
)
def test_completions_that_shrink_are_told_unless_more_are_right(
    task: dict, began: float, now: float, names_the_format: list[bool]
) -> None:
    steps = [GOOD | {"reward/answer": began}] * WINDOW + [GOOD | SHORT | {"reward/answer": now}] * WINDOW
    said = told(steps, RunConfig(task=TaskConfig(**task), rollout=RolloutConfig(prompts_per_step=16)))
    assert ["type task.format_reward_for=right" in one for one in said] == names_the_format


def test_where_nothing_is_earned_since_all_is_cut_the_advice_is_more_tokens() -> None:
    said = told([GOOD | WORTHLESS | {"rollout/truncated_fraction": 1.0}] * WINDOW)
    assert ["Type a higher rollout.max_completion_tokens" in one for one in said] == [True, True]


CUT = {"rollout/truncated_fraction": 1.0}


@pytest.mark.parametrize(
    ("early", "late", "advises_tokens"),
    [
        ({}, WORTHLESS | CUT, []),
        ({}, NOISE | CUT, []),
        ({}, {"policy/entropy_nats": 0.005} | CUT, []),
        (CUT, WORTHLESS | CUT, ["every completion was cut at the token limit"]),
        ({}, CUT, ["every completion was cut at the token limit"]),
    ],
    ids=["worthless", "noise", "one token", "cut from the beginning", "long"],
)
def test_a_collapse_that_ends_at_the_limit_is_no_reason_for_more_tokens(
    early: dict, late: dict, advises_tokens: list[str]
) -> None:
    said = told([GOOD | early] * WINDOW + [GOOD | late] * 20)
    assert [one.partition(":")[0] for one in said if "rollout.max_completion_tokens" in one] == advises_tokens
    assert any("Type a lower optim.learning_rate" in one for one in said) == (late != CUT)


def test_a_resumed_run_compares_with_its_beginning_and_does_not_repeat_itself() -> None:
    worthless, low = GOOD | WORTHLESS, GOOD | HARD
    assert told([worthless] * WINDOW, earlier=[{"eval/accuracy": 0.5}, *[worthless] * WINDOW]) == []
    assert told([low] * WINDOW, earlier=[GOOD] * WINDOW)
    assert not told([low] * WINDOW)


def test_a_resumed_run_repeats_no_warning_of_its_earlier_sessions(
    tiny: Callable[..., RunConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = claimed(tmp_path / "run", tiny())
    cfg, trainer = directory.config(), SimpleNamespace(batch=SimpleNamespace(groups=[]))
    session: Any = SimpleNamespace(cfg=cfg, directory=directory)
    for done in (0, WINDOW):
        tracker = Tracker(cfg, directory, parts=["answer"], last_step=done)
        record_steps(session, tracker, trainer, Mock())  # type: ignore[arg-type]
        for step in range(done + 1, done + WINDOW + 1):
            trainer.on_step(step, GOOD | WORTHLESS)
    assert capsys.readouterr().err.count("no completion has earned anything") == 1
