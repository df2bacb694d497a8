"""LabTrainer with the real engine: the data and seeds of each step, what it measures, and when it stops."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from qerl_lab import tasks
from qerl_lab.aqn import Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.record import checkpoint
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.rollout.engine import Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.tasks import Task
from qerl_lab.train.noise_level import probe
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.stop import Diverged, Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select

REFILLS = {"algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2}
NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}


class RecordingEngine(TransformersEngine):
    """Keeps what it was asked for, and the norms that it had."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, batch_size=64)
        self.asked: list[tuple[list[list[int]], Sampling]] = []
        self.held: list[dict[str, torch.Tensor]] = []
        self.gave: list[Rollout] = []

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        self.asked.append((prompt_ids_P, sampling))
        self.held.append({name: weight.clone() for name, weight in self.norms().items()})
        self.gave.append(super().generate(prompt_ids_P, group_size, sampling))
        return self.gave[-1]


class Run:
    """A finished training: its trainer, its engine, and (step, metrics) of each step."""

    def __init__(
        self, cfg: RunConfig, policy: Policy, task: Task, folder: Path, stop: Stop, prepare: Callable[["Run"], object]
    ) -> None:
        self.cfg, self.policy, self.engine = cfg, policy, RecordingEngine(policy)
        self.steps: list[tuple[int, dict[str, float]]] = []
        cursor = Cursor(select(cfg, policy, task))
        self.trainer = LabTrainer(cfg, policy, self.engine, cursor, folder, lambda *step: self.keep(*step), stop)
        self.trainer.before_save = lambda: {"config": {}}
        prepare(self)
        self.trainer.train()

    def keep(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((step, metrics))


@pytest.fixture
def train(tiny, build_policy, tmp_path) -> Callable[..., Run]:
    """Trains; `prepare` is given the run before it starts, with `earn` every completion earns that."""

    def run(
        policy: Policy | None = None, stop: Stop | None = None, earn: float | None = None,
        prepare: Callable[[Run], object] = lambda _: None, **changes: object,
    ) -> Run:  # fmt: skip
        cfg = tiny(**({"steps": 1, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 40} | changes))
        task = tasks.load(cfg.task)
        if earn is not None:
            ones = {"format": earn, "answer": 0.0}
            task = replace(task, weights=ones, grade=lambda texts, _: {part: np.ones(len(texts)) for part in ones})
        return Run(cfg, policy or build_policy(cfg), task, tmp_path, stop or Stop(), prepare)

    return run


def test_every_step_is_reported_once_with_declared_metrics(train) -> None:
    run = train(steps=3, algorithm__updates_per_rollout=2, **NOISE, **REFILLS, algorithm__overlong_buffer_tokens=8)
    assert [step for step, _ in run.steps] == [1, 2, 3]
    names = set(declared_metrics(["format", "answer"]))
    for _, metrics in run.steps:
        assert set(metrics) <= names
        assert all(math.isfinite(value) for value in metrics.values())
        phases = [metrics[f"seconds/{name}"] for name in ("rollout", "reward", "sync", "probe", "train")]
        assert min(phases) >= 0
        assert metrics["step/seconds"] == pytest.approx(sum(phases))
    of_others = {"policy/kl_reference", "policy/weight_cut_fraction", "policy/entropy_coef", "memory/gpu_peak_gib"}
    of_others |= {"noise/kl_target", "noise/kl_solved", "noise/probes", "seconds/wait"}  # aqn.unit=kl, gpus=2
    missing = names - set(run.steps[0][1]) - of_others
    assert all(name.startswith("eval/") for name in missing)
    assert [metrics["noise/sigma"] for _, metrics in run.steps] == pytest.approx([0.3, 0.3, 5e-4])


def test_policy_and_sampler_entropy_agree_without_noise(train) -> None:
    """Micro-batches of four hold different numbers of tokens, which a mean of their means would not know."""
    ((_, metrics),) = train(rollout__max_completion_tokens=80).steps
    assert metrics["policy/entropy_nats"] > 0.01
    assert metrics["policy/entropy_nats"] == pytest.approx(metrics["sampler/entropy_nats"], abs=1e-5)
    assert metrics["sampler/logprob_gap_max"] < 1e-4


def test_dropout_parts_neither_sampler_and_trainer_nor_an_update_and_its_rollout(train) -> None:
    ((_, metrics),) = train(lora__dropout=0.5).steps
    assert metrics["sampler/logprob_gap_max"] < 1e-4
    assert metrics["policy/clip_fraction"] == 0


@pytest.mark.parametrize(("algorithm", "group"), [("grpo", 16), ("dapo", 8)])
def test_equal_rewards_change_not_one_bit_of_the_adapter(train, tiny, build_policy, algorithm: str, group: int) -> None:
    policy = build_policy(tiny())
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    run = train(policy, earn=0.2, steps=2, rollout__group_size=group, algorithm__name=algorithm)
    for _, metrics in run.steps:
        assert metrics["reward/zero_variance_groups"] == 1
        assert metrics["reward/mean"] == pytest.approx(0.2, abs=1e-15)
        assert metrics["policy/grad_norm"] == 0
    assert all(torch.equal(policy.model.get_parameter(name), weights) for name, weights in before.items())


class After(TrainerCallback):
    """Calls something after every optimizer update."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self.call()


def test_a_clock_is_read_when_the_device_is_done(train) -> None:
    """A device works on after a call has returned: the ends of a sync and of a step wait for it."""
    events: list[str] = []

    def watch(run: Run) -> None:
        run.trainer.clock.wait = lambda: events.append("wait")
        run.trainer.add_callback(After(lambda: events.append("update")))
        run.keep = lambda *_: events.append("report")
        run.engine.sync = lambda *_: events.append("sync")
        run.engine.sleep = lambda: events.append("sleep")

    train(prepare=watch, steps=2, algorithm__updates_per_rollout=2)
    rollout = ["sync", "wait", "sleep"]
    step = [*rollout, "wait", "update", "update", "wait", "report"]  # the first wait here is that of the probes
    assert events == step * 2


def test_a_loss_that_is_nan_ends_the_run_with_its_line(train, tmp_path) -> None:
    """The second update of step 1 meets the weights that the first has made."""
    steps: list[dict[str, float]] = []

    def explode(run: Run) -> None:
        run.keep = lambda _, metrics: steps.append(metrics)
        run.trainer.args.learning_rate = 1e30

    with pytest.raises(Diverged, match=r"loss is NaN at step 1\. Type a lower optim\.learning_rate \(it is 1e-05\)"):
        train(prepare=explode, steps=3, algorithm__updates_per_rollout=2, checkpoint__every=1)
    (metrics,) = steps
    assert math.isnan(metrics["policy/loss"])
    assert math.isnan(metrics["policy/entropy_nats"])
    assert math.isfinite(metrics["reward/mean"])
    assert not checkpoint.newest(tmp_path / "checkpoints")


def test_a_weight_that_is_nan_ends_the_run_before_it_is_saved(train, tmp_path) -> None:
    reported: list[int] = []

    def poison(run: Run) -> None:
        weight = next(p for name, p in run.policy.model.named_parameters() if "lora_B" in name)
        run.keep = lambda step, _: reported.append(step)
        run.trainer.add_callback(After(lambda: run.trainer.step == 2 and weight.data[0].fill_(math.nan)))

    with pytest.raises(Diverged, match="largest weight of the adapter is NaN at step 2"):
        train(prepare=poison, steps=3, checkpoint__every=1)
    assert reported == [1, 2]
    assert checkpoint.newest(tmp_path / "checkpoints").step == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_holds_the_noise_of_the_seed_and_step(train, dtype: str) -> None:
    """Its last sigma is 5e-4, where bfloat16 weights of 1 have steps of 16 sigma."""
    small = {"rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 8}
    run = train(steps=3, seed=7, model__dtype=dtype, algorithm__updates_per_rollout=2, **small, **NOISE)
    assert len(run.engine.held) == 3
    for step, (held, (_, metrics)) in enumerate(zip(run.engine.held, run.steps, strict=True), start=1):
        noise = Noise(metrics["noise/sigma"], seed=7, step=step)
        gaps = [held[name] - clean for name, clean in run.policy.clean_norms.items()]
        assert metrics["noise/std_observed"] == pytest.approx(torch.cat(gaps).std().item(), rel=1e-6)
        assert metrics["noise/std_observed"] == pytest.approx(noise.sigma, rel=0.1)
        for name, clean in run.policy.clean_norms.items():
            assert torch.equal(held[name], noise.onto_norms({name: clean})[name])


def test_without_noise_nothing_is_probed(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL is 0, and every token tells the kernels' gap. An engine with other norms is probed."""
    spy = Mock(wraps=probe)
    monkeypatch.setattr("qerl_lab.train.trainer.probe", spy)
    ((_, metrics),) = train().steps
    assert not spy.called
    assert metrics["noise/kl_nats"] == 0
    for of in ("mean", "max"):
        assert metrics[f"sampler/kernel_gap_{of}"] == metrics[f"sampler/logprob_gap_{of}"] > 0
    ((_, noisy),) = train(rollout__temperature=0.7, **NOISE).steps
    assert spy.call_count == 1
    assert noisy["sampler/kernel_gap_max"] < 1e-4 < noisy["sampler/logprob_gap_max"]

    def off(engine: TransformersEngine) -> dict[str, torch.Tensor]:
        return {name: norm + 0.1 for name, norm in held(engine).items()}

    held = TransformersEngine.norms
    monkeypatch.setattr(TransformersEngine, "norms", off)
    ((_, wrong),) = train().steps
    assert spy.call_count == 2
    assert wrong["noise/kl_nats"] > 0


def test_all_ranks_probe_where_one_has_noise(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the mean of what they find, and one alone would wait for ever. Here another rank has it."""
    spy = Mock(wraps=probe)
    monkeypatch.setattr("qerl_lab.train.trainer.probe", spy)
    monkeypatch.setattr(Ranks, "any", lambda ranks, flag: True)
    train()
    assert spy.call_count == 1


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


@pytest.mark.parametrize(("every", "kept"), [(0, [5]), (2, [4, 5])])
def test_checkpoints_are_written_every_so_often_and_at_the_end(train, tmp_path, every: int, kept: list[int]) -> None:
    train(steps=5, checkpoint__every=every, rollout__max_completion_tokens=4)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:06d}" for step in kept]
