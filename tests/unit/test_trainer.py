"""LabTrainer with the real engine: the data and seeds of each step, what it measures, and when it stops."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl_lab import checkpoint, tasks
from qerl_lab.aqn import Noise
from qerl_lab.config import RunConfig
from qerl_lab.policy import Policy
from qerl_lab.rollout import Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.tracking import METRICS
from qerl_lab.trainer import LabTrainer, Stop, training_rows

NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}


class RecordingEngine(TransformersEngine):
    """Keeps what it was asked for, and the norms that it had."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, batch_size=64)
        self.asked: list[tuple[list[list[int]], Sampling]] = []
        self.held: list[dict[str, torch.Tensor]] = []

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        self.asked.append((prompt_ids_P, sampling))
        self.held.append({name: weight.clone() for name, weight in self.norms.items()})
        return super().generate(prompt_ids_P, group_size, sampling)


class Run:
    """A finished training: its trainer, its engine, and (step, metrics) of each step."""

    def __init__(self, cfg: RunConfig, policy: Policy, folder: Path, stop: Stop) -> None:
        self.cfg, self.policy, self.engine = cfg, policy, RecordingEngine(policy)
        self.task = tasks.load(cfg.task)
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.trainer = LabTrainer(cfg, policy, self.engine, self.task, folder, self.keep, stop)
        self.trainer.train()

    def keep(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((step, metrics))


@pytest.fixture
def train(tiny, build_policy, tmp_path) -> Callable[..., Run]:
    def run(policy: Policy | None = None, stop: Stop | None = None, **changes: object) -> Run:
        cfg = tiny(**({"steps": 1, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 40} | changes))
        return Run(cfg, policy or build_policy(cfg), tmp_path, stop or Stop())

    return run


def test_every_step_is_reported_once_with_declared_metrics(train) -> None:
    run = train(steps=3, algorithm__updates_per_rollout=2, **NOISE)
    assert [step for step, _ in run.steps] == [1, 2, 3]
    for _, metrics in run.steps:
        assert set(metrics) <= set(METRICS)
        assert all(math.isfinite(value) for value in metrics.values())
        phases = [metrics[f"seconds/{name}"] for name in ("rollout", "reward", "sync", "probe", "train")]
        assert min(phases) >= 0
        assert metrics["step/seconds"] == pytest.approx(sum(phases))
    missing = set(METRICS) - set(run.steps[0][1]) - {"policy/kl_reference", "memory/gpu_peak_gib"}
    assert all(name.startswith("eval/") for name in missing)
    assert [metrics["noise/sigma"] for _, metrics in run.steps] == pytest.approx([0.3, 0.3, 5e-4])


def test_policy_and_sampler_entropy_agree_without_noise(train) -> None:
    """Micro-batches of four hold different numbers of tokens, which a mean of their means would not know."""
    ((_, metrics),) = train(rollout__max_completion_tokens=80).steps
    assert metrics["policy/entropy_nats"] > 0.01
    assert metrics["policy/entropy_nats"] == pytest.approx(metrics["sampler/entropy_nats"], abs=1e-5)
    assert metrics["sampler/logprob_gap_max"] < 1e-4


@pytest.mark.parametrize("scale", [0.0, 1e4], ids=["uniform", "certain"])
def test_policy_entropy_in_closed_form(train, tiny, build_policy, scale: float) -> None:
    """A final norm of zero makes all logits equal, a huge one makes one of them certain."""
    policy = build_policy(tiny())
    policy.model.get_base_model().model.norm.weight.data *= scale
    ((_, metrics),) = train(policy, rollout__max_completion_tokens=8).steps
    expected = math.log(policy.model.config.vocab_size) if scale == 0 else 0.0
    assert metrics["policy/entropy_nats"] == pytest.approx(expected, abs=1e-3)
    assert metrics["sampler/entropy_nats"] == pytest.approx(expected, abs=1e-3)


def test_noise_parts_sampler_and_trainer_unless_both_have_it(train) -> None:
    ((_, apart),) = train(**NOISE).steps
    ((_, together),) = train(**NOISE, aqn__scope="rollout_and_train").steps
    assert apart["sampler/logprob_gap_max"] > 0.01
    assert together["sampler/logprob_gap_max"] < 1e-4
    for metrics in (apart, together):
        assert metrics["noise/std_observed"] == pytest.approx(0.3, rel=0.1)
        assert metrics["noise/kl_nats"] > 1e-3


def test_the_engine_holds_the_noise_of_the_seed_and_step(train) -> None:
    run = train(steps=3, seed=7, algorithm__updates_per_rollout=2, **NOISE)
    assert len(run.engine.held) == 3
    for step, (held, (_, metrics)) in enumerate(zip(run.engine.held, run.steps, strict=True), start=1):
        noise = Noise(metrics["noise/sigma"], seed=7, step=step)
        gaps = [held[name] - clean for name, clean in run.policy.clean_norms.items()]
        assert metrics["noise/std_observed"] == pytest.approx(torch.cat(gaps).std().item(), rel=1e-6)
        for name, clean in run.policy.clean_norms.items():
            assert torch.equal(held[name], noise.onto(clean, name, torch.float32))


def test_without_probes_the_kl_is_not_measured(train) -> None:
    ((_, metrics),) = train(aqn__probe_prompts=0).steps
    assert "noise/kl_nats" not in metrics
    assert "noise/std_observed" in metrics


def test_each_step_asks_the_next_questions_as_chats_with_the_instruction(train) -> None:
    run = train(steps=3)
    rows = training_rows(run.cfg, run.policy, run.task)
    asked = [prompt for prompts, _ in run.engine.asked for prompt in prompts]
    assert asked == [run.policy.prompt_ids(messages) for messages in rows["prompt"]]
    assert all(run.cfg.task.instruction in run.policy.tokenizer.decode(prompt) for prompt in asked)
    samplings = [sampling for _, sampling in run.engine.asked]
    assert len({sampling.seed for sampling in samplings}) == 3
    assert all(sampling.max_tokens == 40 for sampling in samplings)


def test_data_order_is_one_seeded_permutation_after_another(tiny, build_policy) -> None:
    def order(**changes: object) -> list[str]:
        cfg = tiny(steps=40, task__train_questions=64, **changes)
        return [chat[-1]["content"] for chat in training_rows(cfg, policy, tasks.load(cfg.task))["prompt"]]

    policy = build_policy(tiny())
    rows = order()
    assert len(rows) == 160
    for pass_ in (rows[:64], rows[64:128]):
        assert len(set(pass_)) == 64
    assert set(rows[:64]) == set(rows[64:128])
    assert rows[:64] != rows[64:128]
    assert order() == rows
    assert order(seed=1) != rows
    short = tiny(steps=20, task__train_questions=64)
    assert [c[-1]["content"] for c in training_rows(short, policy, tasks.load(short.task))["prompt"]] == rows[:80]


def test_long_questions_are_left_out(tiny, build_policy) -> None:
    policy, task = build_policy(tiny()), tasks.load(tiny().task)
    lengths = {question.prompt: len(policy.prompt_ids(task.messages(question))) for question in task.train}
    limit = sorted(lengths.values())[len(lengths) // 2]
    rows = training_rows(tiny(steps=40, rollout__max_prompt_tokens=limit), policy, task)
    assert {chat[-1]["content"] for chat in rows["prompt"]} == {p for p, n in lengths.items() if n <= limit}
    with pytest.raises(ValueError, match=r"no training question fits rollout\.max_prompt_tokens=3"):
        training_rows(tiny(rollout__max_prompt_tokens=3), policy, task)


def test_a_request_to_stop_lets_the_step_end_saves_and_stops(train, tmp_path) -> None:
    stop = Stop()
    stop.signalled = True
    run = train(stop=stop, steps=3, algorithm__updates_per_rollout=2, checkpoint__every=0)
    assert [step for step, _ in run.steps] == [1]
    saved = checkpoint.newest(tmp_path / "checkpoints")
    assert (saved.step, saved.prompts_seen) == (1, 2)


def test_a_signal_that_arrives_while_stopping_is_decided_still_saves(train, tmp_path) -> None:
    """It must not stop the run after the question whether to save was answered with no."""

    class Late(Stop):
        asked = 0

        @property
        def requested(self) -> bool:
            self.asked += 1
            return self.asked > 1

    run = train(stop=Late(), steps=3, checkpoint__every=0)
    assert checkpoint.newest(tmp_path / "checkpoints").step == run.trainer.steps_done


def test_the_death_of_the_starter_is_a_request_to_stop() -> None:
    assert not Stop().requested
    assert Stop(parent=1 << 30).requested


@pytest.mark.parametrize(("every", "kept"), [(0, [5]), (2, [4, 5])])
def test_checkpoints_are_written_every_so_often_and_at_the_end(train, tmp_path, every: int, kept: list[int]) -> None:
    train(steps=5, checkpoint__every=every, rollout__max_completion_tokens=4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in kept]
