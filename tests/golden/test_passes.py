"""pass@k against every subset of the samples."""

import itertools

import numpy as np
import pytest

from qerl_lab.report.stats import pass_at, values_of_k


def every_subset(k: int, right: int, samples: int) -> float:
    """Return the share of the subsets of `k` samples that have one of the `right` ones."""
    return float(np.mean([min(subset) < right for subset in itertools.combinations(range(samples), k)]))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for samples in range(1, 11):
        for k in range(1, samples + 1):
            expected = [every_subset(k, right, samples) for right in range(samples + 1)]
            assert pass_at(k, range(samples + 1), samples) == pytest.approx(expected, abs=1e-12)


def test_large_counts_stay_exact() -> None:
    """C(2000, 1000) is too large for a float."""
    assert pass_at(1000, [0, 1, 1000, 2000], 2000) == pytest.approx([0, 0.5, 1, 1], abs=1e-12)
    assert pass_at(1, [500], 2000) == pytest.approx([0.25])


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (16, [1, 2, 4, 8, 16])])
def test_k_takes_the_powers_of_two_and_the_number_of_samples(samples: int, expected: list[int]) -> None:
    assert values_of_k(samples) == expected


@pytest.mark.parametrize(("k", "right"), [(0, 1), (5, 1), (2, -1), (2, 5)])
def test_impossible_counts_of_four_samples_are_refused(k: int, right: int) -> None:
    with pytest.raises(ValueError, match="of 4 samples; allowed: "):
        pass_at(k, [right], 4)
