"""On-policy the correction takes the training forward's own log-probs: loss and gradients are those of TRL's.

The old way is TRL's: it takes the log-probs of the rollout in a forward before, and weighs with them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trained
from qerl_lab.algorithms import correction
from qerl_lab.algorithms.correction import Weights
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.train.trainer import LabTrainer
from trained import Jittered, Trained

NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}
NOISES = {"clean": {}, "noise": NOISE, "noise in both": NOISE | {"aqn__scope": "rollout_and_train"}}
DAPO = {
 "algorithm__name": "dapo", "algorithm__beta": 0.1, "algorithm__mask_truncated": True, "rollout__temperature": 0.9,
    "rollout__prompts_per_step": 4, "rollout__max_completion_tokens": 40,
}  # fmt: skip


@pytest.fixture
def train(tiny, build_policy, tmp_path: Path) -> Callable[..., Trained]:
    """Runs a small training; `is_old` has TRL correct, in the way of a run with several updates."""

    def run(is_old: bool = False, learner: Policy | None = None, **changes: Any) -> Trained:
        small = {"steps": 1, "rollout__max_completion_tokens": 32, "optim__micro_batch_size": 2}
        cut = {"rollout__importance_clip_max": 1.2, "rollout__prompts_per_step": 2}
        cfg: RunConfig = tiny(**(small | cut | changes))
        policy = learner or build_policy(cfg)
        return trained.train(cfg, policy, Jittered(policy, 64), tmp_path, is_old)

    return run


@pytest.fixture
def weighed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Of each batch that TRL put weights beside: ours, and TRL's."""
    pairs: list[tuple[Tensor, Tensor]] = []
    weigh = LabTrainer._weigh

    def compared(self: LabTrainer, logps: Tensor, batch: dict[str, Tensor]) -> Tensor:
        ours = weigh(self, logps, batch)
        if "importance_sampling_ratio" in batch:
            pairs.append((ours, batch["importance_sampling_ratio"]))
        return ours

    monkeypatch.setattr(LabTrainer, "_weigh", compared)
    return pairs


# golden/test_correction.py has the weights of every correction.
@pytest.mark.parametrize(
    ("name", "noise", "algorithm"),
    [("token_truncate", "clean", {}), ("in_ratio", "noise in both", {}), ("sequence_mask", "noise", DAPO)],
    ids=["token_truncate-clean-grpo", "in_ratio-noise in both-grpo", "sequence_mask-noise-dapo"],
)
def test_loss_gradients_and_metrics_are_those_of_trls_correction(
    train, weighed: list[tuple[Tensor, Tensor]], name: str, noise: str, algorithm: dict[str, Any]
) -> None:
    """On ragged completions, of which some are cut, in four micro-batches and more of unequal length.

    The weights are TRL's to the last bit of float32.
    """
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
    is_weighed = name not in ("off", "in_ratio")
    assert (of_new["sampler/importance_clipped_fraction"] > 0) == is_weighed, "there was nothing to correct"
    assert (of_new["policy/clip_fraction"] > 0) == (name == "in_ratio")
    ((ours, trls),) = weighed
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
    run = train(steps=2, **changes)
    assert run.scored == forwards * run.sampled


def test_the_old_way_took_two(train) -> None:
    run = train(is_old=True)
    assert run.scored == 2 * run.sampled


def test_a_base_with_dropout_of_its_own_keeps_the_forward_without(train, tiny, build_policy) -> None:
    policy = build_policy(tiny())
    assert not policy.drops_out
    policy.model.config.attention_dropout = 0.1
    assert policy.drops_out
    run = train(learner=policy)
    assert run.scored == 2 * run.sampled


def test_trl_reads_the_advantages_after_its_forward(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seam of the correction. A weight of zero for every token leaves nothing of the loss."""

    def nothing(_name: str, _clip_max: float, trainer: Tensor, _sampler: Tensor, _mask: Tensor) -> Weights:
        return Weights(torch.zeros_like(trainer), torch.zeros_like(trainer, dtype=torch.bool))

    monkeypatch.setattr(correction, "weights", nothing)
    (metrics,) = train().steps
    assert metrics["policy/loss"] == 0
    assert metrics["policy/grad_norm"] == 0
