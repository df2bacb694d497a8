"""Tables of a report's page, reduced to what was measured, and the format of their numbers. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NONE = "-"  # a cell without a measurement
Rows = list[list[str]]


@dataclass(frozen=True)
class Table:
    """A table of text: the first row of `rows` is the head, the first column names the row.

    `left_out` names rows and columns omitted because they would hold only dashes, and why; empty if none.
    """

    title: str
    about: str
    rows: Rows
    left_out: str = ""


def format_number(value: float) -> str:
    """Format a number: three decimals below 10, four digits below 1,000, else whole with commas; no exponent."""
    if abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def without_empty_columns(rows: Rows, names: int = 1) -> tuple[Rows, list[str]]:
    """Drop columns after the first `names` that hold only dashes; return the rows and the heads of dropped columns."""
    head, *body = rows
    empty = [n for n in range(names, len(head)) if body and all(row[n] == NONE for row in body)]
    kept = [[cell for n, cell in enumerate(row) if n not in empty] for row in rows]
    return kept, [head[n] for n in empty]


def without_constant_columns(rows: Rows, heads: Iterable[str]) -> tuple[Rows, str]:
    """Drop columns among `heads` with one value in all rows; return the rows and a sentence that gives those values."""
    head, *body = rows
    alike = {n: body[0][n] for n, name in enumerate(head) if name in set(heads) and len({row[n] for row in body}) == 1}
    said = ", ".join(f"{head[n]} {text}" for n, text in alike.items())
    kept = [[cell for n, cell in enumerate(row) if n not in alike] for row in rows]
    return kept, f" In every row: {said}." if said else ""


def in_words(texts: Sequence[str]) -> str:
    """Join texts as in a sentence: `a`, `a and b`, `a, b and c`; with semicolons if a text contains a comma."""
    divider = "; " if any(", " in text for text in texts) else ", "
    return " and ".join([divider.join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
