"""When a run lets its engine sleep: the trainer computes beside one that sleeps, and nobody asks it then."""

from collections import Counter

import pytest

from failing_engines import Plan
from qerl_lab.aqn import Noise
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.system.exits import OK

SETTINGS = {
    "steps": 2, "checkpoint__every": 0, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 16,
    "eval__questions": 4, "eval__samples": 1, "eval__every": 1, "algorithm__dynamic_sampling": True,
    "algorithm__max_resamples": 2, "aqn__schedule": "linear", "aqn__unit": "kl", "aqn__reading": "equation",
    "aqn__stages": 2, "aqn__kl_start": 0.02, "aqn__kl_end": 0.004, "aqn__sigma_start": 0.1, "aqn__solver__prompts": 2,
    "aqn__solver__draws": 1,
}  # fmt: skip


class Sleeper(TransformersEngine):
    """Knows whether it sleeps, and whether the trainer computed beside it."""

    asleep = False
    calls: Counter[str]

    def __init__(self, policy: Policy, batch_size: int) -> None:
        self.generates = False
        super().__init__(policy, batch_size)
        self.handle = policy.model.get_base_model().register_forward_pre_hook(self._watch)

    def _watch(self, *_: object) -> None:
        if not self.generates:
            self.calls["computed asleep" if self.asleep else "computed awake"] += 1

    def sync(self, noise: Noise) -> None:
        self.asleep = False
        super().sync(noise)

    def generate(self, *args, **kwargs) -> Rollout:
        assert not self.asleep, "a rollout of the step came after the sleep"
        self.generates = True
        self.calls["rollout"] += 1
        try:
            return super().generate(*args, **kwargs)
        finally:
            self.generates = False

    def sleep(self) -> None:
        self.calls["sleep"] += 1
        self.asleep = True

    def close(self) -> None:
        self.handle.remove()
        super().close()


def test_the_trainer_computes_only_beside_an_engine_that_sleeps(new_runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """In steps with further rollouts, a solver of the noise, its probe, and evaluations between."""
    monkeypatch.setattr(Sleeper, "calls", Counter(), raising=False)
    monkeypatch.setattr(Plan, "build", lambda plan, cfg, policy: Sleeper(policy, cfg.rollout.batch_size))
    assert new_runs().run() == OK
    assert Sleeper.calls["computed awake"] == 0
    assert Sleeper.calls["computed asleep"] > 10
    assert Sleeper.calls["rollout"] > Sleeper.calls["sleep"] == 2 + 2  # of the steps and of their noises' stages
