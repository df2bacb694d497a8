"""A table of a report's page, and how it is kept to what was measured. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NONE = "-"  # what a cell says where nothing was measured
Rows = list[list[str]]


@dataclass(frozen=True)
class Table:
    """A table of text: `rows` begin with its head, the first column names the row.

    `left_out` says in a line which rows and columns would have held dashes alone, and why; empty if none.
    """

    title: str
    about: str
    rows: Rows
    left_out: str = ""


def filled(rows: Rows, names: int = 1) -> tuple[Rows, list[str]]:
    """The rows, less the columns after the first `names` that say nothing but dashes, and the heads of these."""
    head, *body = rows
    empty = [n for n in range(names, len(head)) if body and all(row[n] == NONE for row in body)]
    kept = [[cell for n, cell in enumerate(row) if n not in empty] for row in rows]
    return kept, [head[n] for n in empty]


def unlike(rows: Rows, heads: Iterable[str]) -> tuple[Rows, str]:
    """The rows, less those of the columns `heads` in which all are alike, and a sentence with what these say."""
    head, *body = rows
    alike = {n: body[0][n] for n, name in enumerate(head) if name in set(heads) and len({row[n] for row in body}) == 1}
    said = ", ".join(f"{head[n]} {text}" for n, text in alike.items())
    kept = [[cell for n, cell in enumerate(row) if n not in alike] for row in rows]
    return kept, f" In every row: {said}." if said else ""


def in_words(texts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`; after a comma within a text each is divided by a semicolon."""
    divider = "; " if any(", " in text for text in texts) else ", "
    return " and ".join([divider.join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
