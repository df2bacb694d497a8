"""KL of the noise, and what parts the sampler from the policy with its norms, measured on the trainer's own model."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout
from qerl_lab.train.noise_level import probe
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.trainer import LabTrainer
from ranks_as_threads import threads
from rollouts import distributions, of_tokens

NOISE = Noise(0.3, seed=0, step=1)
PROMPTS = [[5], [3, 4, 5, 6, 7, 8], [9, 8, 7]]
COMPLETIONS = [[[7, 9, 11], [5]], [[1, 3, 4, 5], [8, 8]], [[6], [2, 3]]]
TOLD = [[[-1.0 - token / 8 for token in row] for row in group] for group in COMPLETIONS]
ROLLOUT = Rollout(PROMPTS, COMPLETIONS, TOLD, [], entropy=None, seconds=1.0)


def held(policy: Policy, noise: Noise) -> dict[str, Tensor]:
    return noise.onto_norms(policy.clean_norms)


def kl(policy: Policy, noisy: dict[str, Tensor], every: int = 1) -> float:
    """KL at temperature 0.8 of every so-manyth completion, over the vocabulary in float64."""
    p, q = (torch.cat(distributions(policy, ROLLOUT, norms, 0.8)[::every]) for norms in (noisy, None))
    return (p.exp() * (p - q)).sum(-1).mean().item()


def measured(policy: Policy, norms: dict[str, Tensor], completions: int, temperature: float = 0.8) -> float:
    return probe(policy, norms, ROLLOUT, completions, temperature)[0].mean().item()


def test_it_is_zero_without_noise_and_the_vocabulary_sum_with_it(policy: Policy) -> None:
    assert measured(policy, held(policy, CLEAN), 4) == 0
    noisy = held(policy, NOISE)
    expected = kl(policy, noisy)
    assert expected > 0.01
    assert measured(policy, noisy, 100) == measured(policy, noisy, 6) == pytest.approx(expected, rel=1e-3)
    assert measured(policy, noisy, 6, temperature=1.0) != pytest.approx(expected, rel=1e-2)


def test_the_completions_measured_are_spread_over_the_prompts(policy: Policy) -> None:
    noisy = held(policy, NOISE)
    assert measured(policy, noisy, 3) == pytest.approx(kl(policy, noisy, every=2), rel=1e-3)


def test_norms_of_an_engine_in_another_dtype_are_measured_as_they_are(policy: Policy) -> None:
    rounded = {name: weight.bfloat16() for name, weight in held(policy, NOISE).items()}
    exact = {name: weight.float() for name, weight in rounded.items()}
    as_held, in_full = (probe(policy, norms, ROLLOUT, 6, 0.8) for norms in (rounded, exact))
    assert all(map(torch.equal, as_held, in_full))


def test_the_kernel_gap_is_what_the_sampler_says_beyond_its_own_weights(policy: Policy) -> None:
    noisy = held(policy, NOISE)
    logps = of_tokens(distributions(policy, ROLLOUT, noisy, 0.8), ROLLOUT).tolist()
    told = [[[logps.pop(0) for _ in ids] for ids in group] for group in COMPLETIONS]
    sound = replace(ROLLOUT, logprobs_P_G=told)
    assert probe(policy, noisy, sound, 6, temperature=0.8)[1].max() < 1e-5
    off = replace(ROLLOUT, logprobs_P_G=[[[x + 0.1 * n for n, x in enumerate(row)] for row in group] for group in told])
    expected = [0.1 * n for group in COMPLETIONS for row in group for n in range(len(row))]
    assert probe(policy, noisy, off, 6, temperature=0.8)[1].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_policy_is_left_as_it_was(policy: Policy, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout meanwhile, and also after a failure."""
    policy.model.train(training)
    pointers = {name: norm.data_ptr() for name, norm in policy.norms.items()}
    probe(policy, held(policy, NOISE), ROLLOUT, 4, 0.8)

    def fail(*_: object, **__: object) -> None:
        assert not policy.model.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy.model.get_base_model().base_model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        probe(policy, held(policy, NOISE), ROLLOUT, 4, 0.8)
    assert policy.model.training == training
    assert {name: norm.data_ptr() for name, norm in policy.norms.items()} == pointers
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_what_a_probe_finds_is_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean over the tokens of both, the largest of either, and on each rank the same."""
    own = [(Tensor([0.1]), Tensor([1.0])), (Tensor([0.3, 0.5]), Tensor([0.0, 8.0]))]
    monkeypatch.setattr("qerl_lab.train.trainer.probe", lambda policy, norms, rollout, *_: own[rollout])
    monkeypatch.setattr("qerl_lab.train.trainer.aqn.observed_std", lambda *_: 0.0)

    def found(ranks: Ranks) -> dict[str, float]:
        engine, level = Mock(norms=lambda: {"norm": torch.ones(1)}), Mock(metrics=lambda step: {})
        trainer = Mock(ranks=ranks, measured={}, engine=engine, level=level, cfg=RunConfig())
        trainer.policy.clean_norms = {"norm": torch.zeros(1)}
        LabTrainer._measure_noise(trainer, ranks.rank)
        return trainer.measured

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(found, threads(2))
    assert first == second
    assert (first["sampler/kernel_gap_mean"], first["sampler/kernel_gap_max"]) == (3.0, 8.0)
    assert first["noise/kl_nats"] == pytest.approx(0.3)
