"""Plain numbers, which most answers are: read exactly, and thousands of them in a second."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"([-+]?)\s*(?:\\?\$\s*)?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
MAX_DIGITS = 1000


def number(text: str) -> Decimal | None:
    """The number that `text` is, its sign, thousands separators and money sign read; None where it is anything else.

    Nothing around it is passed over: a second number, an exponent or a word can make it another number.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    found = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_DIGITS else None
    return Decimal(found[1] + found[2].replace(",", "")) if found else None
