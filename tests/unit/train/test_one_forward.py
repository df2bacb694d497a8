"""On-policy the correction takes the training forward's own log-probs: loss and gradients are those of TRL's.

The old way is TRL's: it takes the log-probs of the rollout in a forward before, and weighs with them.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from qerl_lab import tasks
from qerl_lab.algorithms import correction
from qerl_lab.algorithms.correction import Weights
from qerl_lab.config.schema import CORRECTIONS, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.train.data import Cursor, select
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer

NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}
NOISES = {"clean": {}, "noise": NOISE, "noise in both": NOISE | {"aqn__scope": "rollout_and_train"}}
DAPO = {
 "algorithm__name": "dapo", "algorithm__beta": 0.1, "algorithm__mask_truncated": True, "rollout__temperature": 0.9,
    "rollout__prompts_per_step": 4, "rollout__max_completion_tokens": 40,
}  # fmt: skip


class Jittered(TransformersEngine):
    """Tells log-probs up to half a nat off, so that every correction has something to correct."""

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        out, rng = super().generate(prompt_ids_P, group_size, sampling), random.Random(3)
        told = [[[x + rng.uniform(-0.5, 0.5) for x in row] for row in group] for group in out.logprobs_P_G]
        return replace(out, logprobs_P_G=told)


@dataclass
class Trained:
    """What a training did."""

    trainer: LabTrainer
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # of each update
    steps: list[dict[str, float]] = field(default_factory=list)
    scored: int = 0  # completions that a forward of the trainer took the log-probs of
    sampled: int = 0


class Gradients(TrainerCallback):
    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        named = self.trained.trainer.policy.model.named_parameters()
        self.trained.gradients.append({name: p.grad.clone() for name, p in named if p.requires_grad})


@pytest.fixture
def train(tiny, build_policy, tmp_path: Path) -> Callable[..., Trained]:
    """Runs a small training; `is_old` has TRL correct, in the way of a run with several updates."""

    def run(is_old: bool = False, learner: Policy | None = None, **changes: Any) -> Trained:
        small = {"steps": 1, "rollout__max_completion_tokens": 32, "optim__micro_batch_size": 2}
        cfg: RunConfig = tiny(
            **(small | {"rollout__importance_clip_max": 1.2, "rollout__prompts_per_step": 2} | changes)
        )
        policy = learner or build_policy(cfg)
        cursor, steps = Cursor(select(cfg, policy, tasks.load(cfg.task))), list[dict[str, float]]()
        trainer = LabTrainer(
            cfg, policy, Jittered(policy, 64), cursor, tmp_path, lambda _, metrics: steps.append(metrics), Stop()
        )
        trainer.before_save = lambda: {"run_key": "", "config": {}, "device": "cpu", "dtype": "torch.float32"}
        trainer.vllm_importance_sampling_correction |= is_old
        trained = Trained(trainer, steps=steps)
        trainer.add_callback(Gradients(trained))

        def count(_model: object, _args: object, kwargs: dict[str, Any]) -> None:
            trained.scored += len(kwargs["input_ids"]) if "labels" in kwargs else 0

        policy.model.register_forward_pre_hook(count, with_kwargs=True)
        trainer.train()
        trained.sampled = cfg.completions_per_step * cfg.steps
        return trained

    return run


CASES = [*product(CORRECTIONS, NOISES, [{}]), *product(CORRECTIONS, ["noise"], [DAPO])]


@pytest.mark.parametrize(
    ("name", "noise", "algorithm"), CASES, ids=["-".join([a, b, "dapo" if c else "grpo"]) for a, b, c in CASES]
)
def test_loss_gradients_and_metrics_are_those_of_trls_correction(
    train, name: str, noise: str, algorithm: dict[str, Any]
) -> None:
    """On ragged completions, of which some are cut, in four micro-batches and more of unequal length."""
    changes = {"rollout__importance_correction": name} | NOISES[noise] | algorithm
    old, new = train(is_old=True, **changes), train(**changes)
    (expected,), (found,) = old.gradients, new.gradients
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert largest > 1e-5
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-4, atol=1e-5 * largest, msg=parameter)
    of_old, of_new = old.steps[0], new.steps[0]
    names = [metric for metric in of_old if metric.startswith(("policy/", "sampler/", "noise/"))]
    assert {metric: of_new[metric] for metric in names} == pytest.approx(
        {metric: of_old[metric] for metric in names}, rel=1e-5, abs=1e-6
    )
    assert (of_new["sampler/importance_clipped_fraction"] > 0) == (name != "off"), "there was nothing to correct"
    assert of_new["policy/clip_fraction"] == 0


def test_the_weights_are_trls(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it puts beside a batch, to the last bit of float32."""
    pairs: list[tuple[Tensor, Tensor]] = []
    weigh = LabTrainer._weigh

    def compared(self: LabTrainer, logps: Tensor, batch: dict[str, Tensor]) -> Tensor:
        pairs.append((weigh(self, logps, batch), batch["importance_sampling_ratio"]))
        return pairs[-1][0]

    monkeypatch.setattr(LabTrainer, "_weigh", compared)
    for name in CORRECTIONS:
        train(is_old=True, rollout__importance_correction=name, optim__micro_batch_size=8)
    assert len(pairs) == len(CORRECTIONS)
    for ours, trls in pairs:
        torch.testing.assert_close(ours.expand_as(trls), trls, rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 1),
        (NOISES["noise in both"], 1),
        ({"rollout__importance_correction": "off"}, 1),
        ({"algorithm__beta": 0.1}, 2),  # the reference's
        ({"lora__dropout": 0.3}, 2),
        ({"algorithm__updates_per_rollout": 2}, 2),
        ({"algorithm__num_iterations": 2}, 3),
    ],
)
def test_a_completion_is_scored_by_one_forward_on_policy(train, changes: dict[str, Any], forwards: int) -> None:
    trained = train(steps=2, **changes)
    assert trained.scored == forwards * trained.sampled


def test_the_old_way_took_two(train) -> None:
    trained = train(is_old=True)
    assert trained.scored == 2 * trained.sampled


def test_a_base_with_dropout_of_its_own_keeps_the_forward_without(train, tiny, build_policy) -> None:
    policy = build_policy(tiny())
    assert not policy.drops_out
    policy.model.config.attention_dropout = 0.1
    assert policy.drops_out
    trained = train(learner=policy)
    assert trained.scored == 2 * trained.sampled


def test_trl_reads_the_advantages_after_its_forward(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam of the correction. A weight of zero for every token leaves nothing of the loss."""

    def nothing(_name: str, _clip_max: float, trainer: Tensor, _sampler: Tensor, _mask: Tensor) -> Weights:
        return Weights(torch.zeros_like(trainer), torch.zeros_like(trainer, dtype=torch.bool))

    monkeypatch.setattr(correction, "weights", nothing)
    trained = train()
    assert trained.steps[0]["policy/loss"] == 0
    assert trained.steps[0]["policy/grad_norm"] == 0
