"""Errors of others, as parts of our own messages."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return next(iter(str(error).strip().splitlines()), "no message")
