"""Cells and tables of text: numbers, intervals over seeds, and removal of columns without a measurement. Pure."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_lab.report import stats

NONE = "-"  # a cell without a measurement
ANY = (-math.inf, math.inf)  # bounds that cut nothing
Rows = list[list[str]]
Spell = Callable[[float], str]  # formats a number


@dataclass(frozen=True)
class Table:
    """A table of text with its head in the first row; `left_out` says which rows and columns were empty, and why."""

    title: str
    about: str
    rows: Rows
    left_out: str = ""


def format_number(value: float) -> str:
    """Format a number: three decimals below 10, four digits below 1,000, else whole with commas; no exponent."""
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def format_mean_and_interval(
    interval: stats.Interval, spell: Spell = format_number, spell_end: Spell = format_number
) -> str:
    """Format (mean, low, high) as `mean [low, high]`; with an infinite end as `>= mean [low, no bound]`.

    With nan for low it is `mean` alone, and with nan for the mean too a dash. `spell` formats the mean, `spell_end`
    each end.
    """
    mean, low, high = interval
    if math.isnan(low):
        return NONE if math.isnan(mean) else spell(mean)
    if math.isfinite(low) and math.isfinite(high):
        return f"{spell(mean)} {stats.format_interval(low, high, spell_end)}"
    bound = ">= " if math.isinf(high) else "<= "
    if math.isinf(low) and math.isinf(high):
        bound = ""
    ends = ("no bound" if math.isinf(end) else spell_end(end) for end in (low, high))
    return f"{bound}{spell(mean)} [{', '.join(ends)}]"


def seeds_cell(values: pd.DataFrame, bounds: tuple[float, float] = ANY, spell: Spell = format_number) -> str:
    """Format the mean of values[seeds, questions] as `mean [95% CI] (number of seeds)`; a dash without any value.

    The interval is cut to `bounds`. `spell` formats the mean and each end.
    """
    text = format_mean_and_interval(stats.mean_of_arm(values, bounds), spell, spell)
    return text if text == NONE else f"{text} ({len(values.dropna(how='all'))})"


def geometric_cell(values_S: pd.Series, spell: Spell = format_number, spell_end: Spell = format_number) -> str:
    """Format the geometric mean of positive values over seeds as `mean [95% CI] (number of seeds)`; a dash without any.

    The interval is computed on logarithms. `spell` formats the mean, `spell_end` each end.
    """
    mean, low, high = np.exp(stats.mean_of_arm(np.log(values_S.to_frame()), ANY))
    text = format_mean_and_interval((mean, low, high), spell, spell_end)
    return text if text == NONE else f"{text} ({len(values_S)})"


def without_empty_columns(rows: Rows, keep_first: int = 1) -> tuple[Rows, list[str]]:
    """Drop columns that have only dashes; return the other columns and the heads of those dropped.

    The first `keep_first` columns are never dropped.
    """
    head, *body = rows
    empty = [n for n in range(keep_first, len(head)) if body and all(row[n] == NONE for row in body)]
    kept = [[cell for n, cell in enumerate(row) if n not in empty] for row in rows]
    return kept, [head[n] for n in empty]


def without_constant_columns(rows: Rows, heads: Iterable[str]) -> tuple[Rows, str]:
    """Drop columns among `heads` that have one value in all rows; return the rows and a sentence with these values."""
    head, *body = rows
    wanted, alike = set(heads), dict[int, str]()
    for n, name in enumerate(head):
        texts = {row[n] for row in body}
        if name in wanted and len(texts) == 1:
            alike[n] = texts.pop()
    constants = ", ".join(f"{head[n]} {text}" for n, text in alike.items())
    kept = [[cell for n, cell in enumerate(row) if n not in alike] for row in rows]
    return kept, f" In every row: {constants}." if constants else ""


def in_words(texts: Sequence[str]) -> str:
    """Join texts as in a sentence: `a`, `a and b`, `a, b and c`; with semicolons if a text contains a comma."""
    divider = "; " if any(", " in text for text in texts) else ", "
    return " and ".join([divider.join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
