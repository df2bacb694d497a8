"""Parse plain numbers exactly and fast, since most answers are plain numbers."""

import re
from decimal import Decimal

_NUMBER = re.compile(r"([-+]?)\s*(?:\\?\$\s*)?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
MAX_DIGITS = 1000


def number(text: str) -> Decimal | None:
    """Parse a text as one number with sign, thousands separators and money sign; None for anything else.

    It skips nothing around the number: a second number, an exponent or a word can change its value.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    found = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_DIGITS else None
    return Decimal(found[1] + found[2].replace(",", "")) if found else None
