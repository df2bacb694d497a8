"""Advantages against Eq. 4, kept groups and the overlong punishment: by hand, and in exact arithmetic."""

from fractions import Fraction

import numpy as np
import pytest

from qerl_lab.algorithms.groups import advantage, is_flat, overlong_punishment


def test_advantages_equal_values_worked_out_by_hand() -> None:
    """Rewards 0, 0, 1, 1: mean 1/2, unbiased std sqrt(1/3)."""
    rewards, scaled = np.array([[0.0, 0, 1, 1]]), 0.5 / (3**-0.5 + 1e-4)
    np.testing.assert_allclose(advantage(rewards, True), [[-scaled, -scaled, scaled, scaled]], rtol=1e-15)
    np.testing.assert_array_equal(advantage(rewards, False), [[-0.5, -0.5, 0.5, 0.5]])


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 16, 17])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.2, 1.2, -0.7, 1e6 + 0.1])
def test_equal_rewards_have_an_advantage_of_exactly_zero(reward: float, size: int, normalize_std: bool) -> None:
    rewards = np.full((3, size), reward)
    assert (advantage(rewards, normalize_std) == 0).all()
    assert is_flat(rewards).all()


def test_rewards_that_were_summed_in_another_order_are_equal() -> None:
    rewards = np.array([[0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1]])
    assert rewards[0, 0] != rewards[0, 1]
    assert is_flat(rewards).tolist() == [True]
    assert (advantage(rewards, True) == 0).all()


@pytest.mark.parametrize("size", [8, 16])
@pytest.mark.parametrize("right", [1, 3, 7])
def test_advantages_of_the_papers_rewards_equal_exact_arithmetic(size: int, right: int) -> None:
    """Some completions earn 1.2, the others 0.2. Centred rewards are multiples of 1/G. 0.2 is inexact in binary."""
    rewards = np.array([[1.2] * right + [0.2] * (size - right), [0.2] * size])
    mean = Fraction(right, size)  # of the answer part
    centred = [float(1 - mean)] * right + [float(-mean)] * (size - right)
    std = float(mean * (1 - mean) * size / (size - 1)) ** 0.5
    np.testing.assert_allclose(advantage(rewards, False), [centred, [0] * size], rtol=1e-14)
    np.testing.assert_allclose(advantage(rewards, True)[0], np.array(centred) / (std + 1e-4), rtol=1e-14)
    assert is_flat(rewards).tolist() == [False, True]


def test_a_group_is_kept_unless_all_its_completions_earned_the_same() -> None:
    flat = np.array([[0.0, 0, 0], [0.1 + 0.2, 0.3, 0.3], [1.2, 1.2, 1.2]])
    apart = np.array([[0.2, 0.2, 1.2], [1e-6, 1e-6, 2e-6], [1.0, 1.0, 1.0 + 1e-6], [0, 0, 1e-12]])
    assert is_flat(flat).all()
    assert not is_flat(apart).any()


def test_the_overlong_punishment_equals_values_worked_out_by_hand() -> None:
    """DAPO, Eq. 13, with its own numbers: 20,480 tokens at most, the last 4,096 of them punished."""
    lengths = [[1, 16_383, 16_384, 16_385], [17_408, 18_432, 20_479, 20_480]]
    expected = [[0, 0, 0, -1 / 4096], [-0.25, -0.5, -4095 / 4096, -1]]
    found = overlong_punishment(lengths, max_tokens=20_480, buffer_tokens=4096)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("buffer", [1, 3, 7, 24])
def test_the_overlong_punishment_equals_exact_arithmetic(buffer: int) -> None:
    """Check every length up to the limit of 24 tokens, and a few above it, which no engine returns."""
    allowed, lengths = 24 - buffer, range(1, 30)
    exact = [max(Fraction(-1), min(Fraction(0), Fraction(allowed - length, buffer))) for length in lengths]
    np.testing.assert_allclose(
        overlong_punishment(list(lengths), 24, buffer), [float(part) for part in exact], rtol=1e-15
    )
