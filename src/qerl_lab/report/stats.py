"""Intervals."""

import numpy as np
import pandas as pd
from scipy import stats


def paired_interval(before: pd.Series, after: pd.Series, level: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of the per-question difference `after - before`, by Student's t over questions.

    Paired, because the same questions are asked twice and their difficulty cancels (Miller, arXiv 2411.00640). Both are
    indexed by question id; raises ValueError where they do not hold the same questions, or fewer than two.
    """
    if set(before.index) != set(after.index) or len(before) < 2:
        raise ValueError("a paired interval needs the same questions before and after, two at least")
    difference = (after - before.reindex(after.index)).to_numpy(float)
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half = stats.t.ppf(0.5 + level / 2, len(difference) - 1) * error
    return float(mean), float(mean - half), float(mean + half)
