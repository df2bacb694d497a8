"""Parts of messages: errors of libraries, long lists, and the note before the hub is asked."""

import sys
from collections.abc import Sequence
from functools import cache


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return next(iter(str(error).strip().splitlines()), "no message")


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def in_one_line(error: BaseException) -> str:
    """Return an error's text on one line."""
    return " ".join(str(error).split())


@cache
def say_hub_is_asked(what: str) -> None:
    """Print once that `what` is fetched: a download takes minutes, and the hub's library tries five times silently."""
    said = "asking the Hugging Face hub (without a network it gives up within a minute)"
    print(f"{what}: {said}", file=sys.stderr, flush=True)
