"""Errors of others, as parts of our own messages."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "no message")


def in_one_line(error: BaseException) -> str:
    """All that an error says, on one line; nothing where it says nothing."""
    return " ".join(str(error).split())
