"""On-policy the correction takes the training forward's own log-probs. golden/test_loss.py has the loss of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trained
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from trained import Jittered, Trained

NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}


@pytest.fixture
def train(tiny, build_policy, tmp_path: Path) -> Callable[..., Trained]:
    """Runs a small training."""

    def run(learner: Policy | None = None, **changes: Any) -> Trained:
        small = {"steps": 1, "rollout__prompts_per_step": 2, "optim__micro_batch_size": 2}
        cfg: RunConfig = tiny(**(small | changes))
        policy = learner or build_policy(cfg)
        return trained.train(cfg, policy, Jittered(policy, 64), tmp_path)

    return run


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 1),
        (NOISE | {"aqn__scope": "rollout_and_train"}, 1),
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


def test_a_base_with_dropout_of_its_own_keeps_the_forward_without(train, tiny, build_policy) -> None:
    policy = build_policy(tiny())
    assert not policy.drops_out
    policy.model.config.attention_dropout = 0.1
    assert policy.drops_out
    run = train(learner=policy)
    assert run.scored == 2 * run.sampled
