"""Parts of our own messages: errors of others, long lists."""

from collections.abc import Sequence


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "no message")


def some_of(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_one_line(error: BaseException) -> str:
    """All that an error says, on one line; nothing where it says nothing."""
    return " ".join(str(error).split())
