"""Parts of messages: errors of libraries, long lists, and the note before the hub is asked."""

import sys
from collections.abc import Sequence
from functools import cache


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or "no message" if it has none."""
    return next(iter(str(error).strip().splitlines()), "no message")


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Format the first `most` names and the number of the others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def with_noun(number: int, noun: str) -> str:
    """Format a number with its noun: `1 run`, `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_and_last(first: float, last: float, steps: int) -> str:
    """Format the values of a run's first and last steps as `0.385 -> 0.205`, or one number if the run has one step."""
    return f"{last:.3f}" if steps == 1 else f"{first:.3f} -> {last:.3f}"


def in_one_line(error: BaseException) -> str:
    """Return an error's text joined to one line."""
    return " ".join(str(error).split())


@cache
def say_hub_is_asked(what: str) -> None:
    """Print that the Hugging Face hub is asked for `what`, which can take minutes; once for each `what`."""
    notice = "asking the Hugging Face hub (without a network it gives up within a minute)"
    print(f"{what}: {notice}", file=sys.stderr, flush=True)
