"""Intervals."""

import numpy as np
import pandas as pd
from scipy import stats

Interval = tuple[float, float, float]  # mean, low, high


def paired_interval(before: pd.Series, after: pd.Series, level: float = 0.95) -> Interval:
    """The per-question difference `after - before` of one run, by Student's t over questions.

    Paired, because the same questions are asked twice and their difficulty cancels (Miller, arXiv 2411.00640). Both are
    indexed by question id; raises ValueError where they do not hold the same questions, or fewer than two. It says
    nothing of another seed: that is `crossed_interval`.
    """
    if set(before.index) != set(after.index) or len(before) < 2:
        raise ValueError("a paired interval needs the same questions before and after, two at least")
    difference = (after - before.reindex(after.index)).to_numpy(float)
    mean, error = difference.mean(), difference.std(ddof=1) / np.sqrt(len(difference))
    half = stats.t.ppf(0.5 + level / 2, len(difference) - 1) * error
    return float(mean), float(mean - half), float(mean + half)


def crossed_interval(values_S_Q: np.ndarray, level: float = 0.95) -> Interval:
    """The mean of values[seeds, questions] where both are draws: other seeds, other questions of their kind.

    Two-way random effects, value = mean + seed + question + rest. The half width is the root of the sum of squares of
    Student's t over the seeds' means, which holds seed and rest, and of t times the standard error that the questions
    add, which all seeds share: their variance component by the analysis of variance, 0 at least.

    Of simulated intervals of 95% it covered 0.950 to 0.982 with 2 seeds, to 0.977 with 3, to 0.968 with 5 and to 0.957
    with 10, whatever varied most (256 questions). A bootstrap over seeds and questions covered from 0.57, 0.73, 0.85
    and 0.91, because it cannot draw a seed that it has not seen; Student's t over the seeds alone, which takes the
    questions for all there are, from 0.73, 0.40, 0.23 and 0.14.

    Raises ValueError for fewer than two seeds or questions, and for a value that is missing.
    """
    values = np.asarray(values_S_Q, float)
    if values.ndim != 2 or min(values.shape) < 2 or not np.isfinite(values).all():
        raise ValueError("an interval over seeds and questions needs two of each at least, and every value")
    seeds, questions = values.shape
    mean, of_seeds, of_questions = values.mean(), values.mean(1), values.mean(0)
    rest = values - of_seeds[:, None] - of_questions + mean
    rest_square = (rest**2).sum() / ((seeds - 1) * (questions - 1))
    question_variance = max(0.0, of_questions.var(ddof=1) - rest_square / seeds)
    error_squares = np.array([of_seeds.var(ddof=1) / seeds, question_variance / questions])
    quantiles = stats.t.ppf(0.5 + level / 2, [seeds - 1, questions - 1])
    half = np.sqrt((quantiles**2 * error_squares).sum())
    return float(mean), float(mean - half), float(mean + half)
