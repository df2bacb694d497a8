"""Groups: the completions of one prompt, and what their rewards say about each of them.

Pure functions in float64. TRL adds and averages rewards in float32, where 0.2 and 1.2 are inexact: the mean of eight
equal rewards then differs from them by 1e-8 to 1e-7, and Adam makes full steps of that difference.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rewards = NDArray[np.float64]
SAME = 1e-9  # relative; parts that add up to one reward in different ways differ by rounding


def is_flat(reward_P_G: Rewards) -> NDArray[np.bool_]:
    """Whether all completions of a group earned the same, [P]: such a group says nothing about any of them."""
    return np.ptp(reward_P_G, axis=1) <= SAME * np.abs(reward_P_G).max(axis=1)


def keep(reward_P_G: Rewards) -> NDArray[np.bool_]:
    """Whether a group says something, [P]: DAPO's dynamic sampling (arXiv 2503.14476, Eq. 11) replaces the others.

    DAPO looks at right and wrong answers alone; here every part of the task's reward counts, format too.
    """
    return ~is_flat(reward_P_G)


def advantage(reward_P_G: Rewards, normalize_std: bool) -> Rewards:
    """Reward minus the group's mean (Eq. 4), [P, G]; over (unbiased std + 1e-4) with `normalize_std`.

    Exactly zero in a flat group.
    """
    centred = reward_P_G - reward_P_G.mean(axis=1, keepdims=True)
    if normalize_std:
        centred /= reward_P_G.std(axis=1, ddof=1, keepdims=True) + 1e-4
    return np.where(is_flat(reward_P_G)[:, None], 0.0, centred)


def overlong(lengths: ArrayLike, max_tokens: int, buffer_tokens: int) -> Rewards:
    """DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), in [-1, 0] and of the shape of `lengths` in tokens.

    Zero up to max_tokens - buffer_tokens, then falling in a line to -1 at max_tokens.
    """
    allowed = max_tokens - buffer_tokens
    return np.clip((allowed - np.asarray(lengths, np.float64)) / buffer_tokens, -1.0, 0.0)
