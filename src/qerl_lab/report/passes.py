"""pass@k: the probability that at least one of k samples is right."""

from collections.abc import Sequence

import numpy as np


def pass_at(k: int, right_Q: Sequence[int] | np.ndarray, samples: int) -> np.ndarray:
    """Return pass@k of each question [Q], given that `right_Q` of `samples` samples are right.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, Eq. 1): 1 - C(n - c, k) / C(n, k), computed as one
    minus the product of 1 - k / i over i from n - c + 1 to n. The naive 1 - (1 - c/n)^k would be too small. Raises
    ValueError for k outside 1 to `samples`, and for impossible counts.
    """
    right = np.asarray(right_Q)
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} samples; allowed: pass@1 to pass@{samples}")
    if ((right < 0) | (right > samples)).any():
        raise ValueError(f"{right} right of {samples} samples; allowed: 0 to {samples}")
    misses = np.concatenate([[1.0], np.cumprod([1 - k / max(k, samples - c + 1) for c in range(1, samples + 1)])])
    return 1 - misses[right]


def powers_of_two(samples: int) -> list[int]:
    """Return the k to report pass@k for: 1, 2, 4 ... and `samples` itself."""
    powers = [2**n for n in range(samples.bit_length()) if 2**n < samples]
    return [*powers, samples]
