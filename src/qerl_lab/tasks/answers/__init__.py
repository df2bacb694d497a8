"""Grade the answer in a completion. docs/answers.md says which answers count as equal.

completion.py   finds the text of the final answer, outside of the thinking
surface.py      normalizes the text's spelling
reading.py      parses the form of an answer (forms.py: quantity, list, point, interval, matrix, equation, words) with
    quantity.py     splits a number from its unit, its money sign and the words behind it
    expression.py   parses mathematics into a tree
equality.py     compares two forms, with
    value.py        the value of an expression: exact, or to 100 digits at several points
    intervals.py    sets of real numbers
judge.py        returns the verdict: right, wrong or unreadable; for some forms it asks
library.py      math-verify, in a worker process
"""

import re
from decimal import Decimal

_NUMBER = re.compile(r"([-+]?)\s*(?:\\?\$\s*)?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
MAX_DIGITS = 1000


def number(text: str) -> Decimal | None:
    """Parse a text that is one number, such as "-1,234.5", "$3" or "7.", exactly; return None for any other text.

    Nothing around the number is skipped, because a second number, an exponent or a word can change its value. A text
    over MAX_DIGITS characters gives None too.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    found = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_DIGITS else None
    return Decimal(found[1] + found[2].replace(",", "")) if found else None
