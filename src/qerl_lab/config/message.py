"""Format errors and long lists for messages."""

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), "no message")


def some_of(names: Sequence[str], most: int = 5) -> str:
    """List the first names and the number of the rest."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_one_line(error: BaseException) -> str:
    """Return an error's whole text on one line; empty if it has none."""
    return " ".join(str(error).split())
