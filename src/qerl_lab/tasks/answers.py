"""From a completion to a comparable answer."""

import re
from decimal import Decimal, InvalidOperation

_ANSWER = re.compile(r"<answer>([^<]*)</answer>")
# A comma separates thousands only: "1,2" is two numbers.
_NUMBER = re.compile(r"-?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)", re.ASCII)
MAX_ANSWER_CHARACTERS = 200  # a longer "answer" is no final answer, and bounds the work on hostile output


def final_answer(completion: str) -> str | None:
    """Text of the last complete `<answer>` block, stripped; None where there is none, it is empty or too long."""
    found = _ANSWER.findall(completion)
    text = found[-1].strip() if found else ""
    return text if 0 < len(text) <= MAX_ANSWER_CHARACTERS else None


def number(text: str) -> Decimal | None:
    """The one number in `text`, thousands separators removed; None where there is none or more than one.

    Units and currency signs around it are fine ("$1,250.50 in total"); a second number makes the answer ambiguous.
    """
    found = _NUMBER.findall(text[:MAX_ANSWER_CHARACTERS].replace("\N{MINUS SIGN}", "-"))
    if len(found) != 1:
        return None
    try:
        return Decimal(found[0].replace(",", ""))
    except InvalidOperation:
        return None


def numbers_equal(given: str, answer: str) -> bool:
    """Exact equality of two numbers in text, as values: "1,000" equals "1000.0", "16" does not equal "18"."""
    left, right = number(given), number(answer)
    return left is not None and left == right
