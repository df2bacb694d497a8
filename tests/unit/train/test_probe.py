"""KL of the noise, measured on the trainer's own model."""

import pytest
import torch
from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout
from qerl_lab.train.probe import noise_kl

NOISE = Noise(0.3, seed=0, step=1)
PROMPTS = [[5], [3, 4, 5, 6, 7, 8], [9, 8, 7]]
COMPLETIONS = [[[7, 9, 11], [5]], [[1, 3, 4, 5], [8, 8]], [[6], [2, 3]]]
ROLLOUT = Rollout(PROMPTS, COMPLETIONS, [], [], entropy=None, seconds=1.0)


@pytest.fixture(scope="module")
def policy(tiny, build_policy) -> Policy:
    return build_policy(tiny())


def held(policy: Policy, noise: Noise) -> dict[str, Tensor]:
    return noise.onto_norms(policy.clean_norms, policy.norms)


def by_hand(policy: Policy, noisy: dict[str, Tensor], pairs: list[tuple[list[int], list[int]]]) -> float:
    """KL at temperature 0.8, over the vocabulary in float64, one sequence at a time."""

    def logps() -> Tensor:
        texts = []
        for prompt, completion in pairs:
            logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            texts.append((logits.double() / 0.8).log_softmax(-1))
        return torch.cat(texts)

    with torch.no_grad():
        clean = logps()
        with policy.norms_as(noisy):
            noisy_logps = logps()
    return (noisy_logps.exp() * (noisy_logps - clean)).sum(-1).mean().item()


def test_it_is_zero_without_noise_and_the_vocabulary_sum_with_it(policy: Policy) -> None:
    assert noise_kl(policy, held(policy, CLEAN), ROLLOUT, 4, temperature=0.8).nats == 0
    pairs = [(prompt, ids) for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True) for ids in group]
    noisy = held(policy, NOISE)
    expected = by_hand(policy, noisy, pairs)
    assert expected > 0.01
    measured = noise_kl(policy, noisy, ROLLOUT, 6, temperature=0.8)
    assert measured.nats == pytest.approx(expected, rel=1e-3)
    assert measured.standard_error > 0
    assert noise_kl(policy, noisy, ROLLOUT, 100, temperature=0.8) == measured
    assert noise_kl(policy, noisy, ROLLOUT, 6, temperature=1.0).nats != pytest.approx(expected, rel=1e-2)


def test_the_completions_measured_are_spread_over_the_prompts(policy: Policy) -> None:
    noisy = held(policy, NOISE)
    first = [(prompt, group[0]) for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True)]
    measured = noise_kl(policy, noisy, ROLLOUT, 3, temperature=0.8)
    assert measured.nats == pytest.approx(by_hand(policy, noisy, first), rel=1e-3)


def test_norms_of_an_engine_in_another_dtype_are_measured_as_they_are(policy: Policy) -> None:
    rounded = {name: weight.bfloat16() for name, weight in held(policy, NOISE).items()}
    exact = {name: weight.float() for name, weight in rounded.items()}
    assert noise_kl(policy, rounded, ROLLOUT, 6, 0.8) == noise_kl(policy, exact, ROLLOUT, 6, 0.8)


@pytest.mark.parametrize("training", [True, False])
def test_the_policy_is_left_as_it_was(policy: Policy, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout meanwhile, and also after a failure."""
    policy.model.train(training)
    pointers = {name: norm.data_ptr() for name, norm in policy.norms.items()}
    noise_kl(policy, held(policy, NOISE), ROLLOUT, 4, 0.8)

    def fail(*_: object, **__: object) -> None:
        assert not policy.model.training
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy.model.get_base_model().base_model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        noise_kl(policy, held(policy, NOISE), ROLLOUT, 4, 0.8)
    assert policy.model.training == training
    assert {name: norm.data_ptr() for name, norm in policy.norms.items()} == pointers
    assert all(parameter.grad is None for parameter in policy.model.parameters())
