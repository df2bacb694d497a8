"""Final answers in completions, and the numbers in them."""

import math
import random
from decimal import Decimal

import pytest

from qerl_lab.tasks.answers import MAX_ANSWER_CHARACTERS, final_answer, number, numbers_equal

GOOD = "<think>7+5=12.</think><answer>12</answer>"


@pytest.mark.parametrize(("text", "value"), [
    ("12", "12"), ("-5", "-5"), ("\N{MINUS SIGN}5", "-5"), ("+5", "5"), ("007", "7"), ("-0", "0"),
    ("3.50", "3.5"), (".5", "0.5"), ("5.", "5"), ("1000.0", "1000"),
    ("1,000", "1000"), ("12,345,678.9", "12345678.9"), ("-1,000", "-1000"), ("1,000,", "1000"),
    ("$1,250.50 in total", "1250.5"), ("It is 42!", "42"), ("10%", "10"), ("x = 3", "3"),
    ("9" * 150, "9" * 150),
])  # fmt: skip
def test_the_one_number_in_a_text(text: str, value: str) -> None:
    assert number(text) == Decimal(value)


@pytest.mark.parametrize("text", [
    "", "no number", "-", ".", ",", "nan", "NaN", "inf", "-Infinity", "1e5", "0x1f", "1/2", "16-18", "3 4", "12 or 13",
    "1,2", "1,0000", "1234,567", "1,234,56", "1.2.3", "1.000,50", "\u0663", "\uff11\uff16", "\u00b2", "\u2167", "\x00",
])  # fmt: skip
def test_no_number_two_numbers_or_digits_that_are_not_ascii(text: str) -> None:
    assert number(text) is None


def test_equality_is_of_values_and_exact() -> None:
    assert numbers_equal("1,000", "1000.0")
    assert numbers_equal("-0", "0")
    assert not numbers_equal("16", "18")
    assert not numbers_equal("1", "18")  # the released evaluation compares first characters
    assert not numbers_equal("0.1", "0.10000000000000000000000001")
    assert not numbers_equal("nan", "nan")
    assert not numbers_equal("", "")


@pytest.mark.parametrize(("completion", "answer"), [
    (GOOD, "12"),
    ("<answer> 12\n</answer>", "12"),
    ("<answer>1</answer> no, <answer>2</answer>", "2"),
    ("<answer>1</answer><answer>2", "1"),
    ("<answer><answer>3</answer>", "3"),
    ("<answer></answer>", None),
    ("<answer>1</answer><answer> </answer>", None),
    ("<answer>2 < 3</answer>", None),
    ("<ANSWER>1</ANSWER>", None),
    ("12", None),
    ("", None),
    (f"<answer>{'1' * MAX_ANSWER_CHARACTERS}</answer>", "1" * MAX_ANSWER_CHARACTERS),
    (f"<answer>{'1' * (MAX_ANSWER_CHARACTERS + 1)}</answer>", None),
])  # fmt: skip
def test_the_final_answer_is_the_last_complete_block(completion: str, answer: str | None) -> None:
    assert final_answer(completion) == answer


def test_a_number_in_no_text_is_infinite_or_raises() -> None:
    rng = random.Random(0)
    pieces = ["1", ",", ".", "-", " ", "\u0663", "\ud800", "<", "e", "nan", "\N{MINUS SIGN}"]
    for _ in range(20_000):
        value = number("".join(rng.choices(pieces, k=rng.randrange(12))))
        assert value is None or math.isfinite(value)
