"""Advantages within groups. A group is the set of completions of one prompt. Axes: P prompts (groups), G completions.

Pure functions in float64. TRL sums and averages rewards in float32, where 0.2 and 1.2 are inexact: the mean of eight
equal rewards is then off by 1e-8 to 1e-7, and Adam turns that difference into full steps.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rewards = NDArray[np.float64]
SAME = 1e-9  # relative difference up to which rewards count as equal, because sums of parts differ by rounding


def is_flat(reward_P_G: Rewards) -> NDArray[np.bool_]:
    """Return which groups, [P], are flat: all completions of the group earned the same reward, up to rounding.

    The advantages of a flat group are 0, and dynamic sampling replaces it. DAPO (arXiv 2503.14476, Eq. 11) compares
    right and wrong answers only; here every part of the task's reward counts, format too.
    """
    return np.ptp(reward_P_G, axis=1) <= SAME * np.abs(reward_P_G).max(axis=1)


def advantage(reward_P_G: Rewards, normalize_std: bool) -> Rewards:
    """Compute the advantage of each completion, [P, G]: its reward minus the group's mean, 0 in a flat group.

    With `normalize_std` the difference is divided by the group's unbiased standard deviation + 1e-4. A group is flat if
    all its rewards are equal, see `is_flat`.
    """
    centred = reward_P_G - reward_P_G.mean(axis=1, keepdims=True)
    if normalize_std:
        centred /= reward_P_G.std(axis=1, ddof=1, keepdims=True) + 1e-4
    return np.where(is_flat(reward_P_G)[:, None], 0.0, centred)


def overlong_punishment(lengths: ArrayLike, max_tokens: int, buffer_tokens: int) -> Rewards:
    """Compute DAPO's soft overlong punishment, in [-1, 0], shaped like `lengths`, the completions' numbers of tokens.

    It is 0 up to max_tokens - buffer_tokens, then falls linearly to -1 at max_tokens (arXiv 2503.14476, Eq. 13).
    """
    allowed = max_tokens - buffer_tokens
    return np.clip((allowed - np.asarray(lengths, np.float64)) / buffer_tokens, -1.0, 0.0)
