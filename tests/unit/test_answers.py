"""From completions to answers and rewards, hostile text included."""

import math
import random
import time
from decimal import Decimal

import pytest

from qerl_lab.tasks import bigmath
from qerl_lab.tasks.answers import MAX_ANSWER_CHARACTERS, final_answer, number, numbers_equal
from qerl_lab.tasks.rewards import answer_reward, format_reward

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


@pytest.mark.parametrize(("completion", "reward"), [
    (GOOD, 1),
    ("\n<think>a\nb</think>\n\n<answer>12</answer>\n", 1),
    ("<think></think><answer>12</answer>", 1),
    ("<think>2 < 3 and <b></think><answer>12</answer>", 1),
    ("<answer>12</answer>", 0),
    ("<think>a<answer>12</answer>", 0),
    ("<think>a</think>", 0),
    ("<think>a</think><answer></answer>", 0),
    ("<think>a</think><answer>12", 0),
    ("Well. " + GOOD, 0),
    (GOOD + " Done.", 0),
    (GOOD + GOOD, 0),
    ("<think>a</think><think>b</think><answer>12</answer>", 0),
    ("<think>a<think>b</think><answer>12</answer>", 0),
    ("<think>a</think>b</think><answer>12</answer>", 0),
    ("<think>a<answer>1</answer></think><answer>12</answer>", 0),
    ("<think>a</think> so <answer>12</answer>", 0),
    ("<answer>12</answer><think>a</think>", 0),
    ("", 0),
])  # fmt: skip
def test_the_format_is_one_think_block_then_one_answer_block(completion: str, reward: float) -> None:
    assert format_reward(completion) == reward


def test_the_answer_reward_needs_the_right_answer_only() -> None:
    assert answer_reward(GOOD, "12", numbers_equal) == 1
    assert answer_reward(GOOD, "13", numbers_equal) == 0
    assert answer_reward("no think block, <answer>12.0</answer>", "12", numbers_equal) == 1
    assert answer_reward("12", "12", numbers_equal) == 0


LENGTH = 200_000
HOSTILE = {
    "open tags": "<think>" * (LENGTH // 7),
    "closed think": "</think>" * (LENGTH // 8),
    "answers without end": "<answer>" * (LENGTH // 8),
    "angle brackets": "<think>" + "<" * LENGTH,
    "almost tags": "<think>" + "<a" * (LENGTH // 2) + "</think><answer>1</answer>",
    "blanks before": " " * LENGTH + "x",
    "blanks between": "<think>a</think>" + " " * LENGTH + "<answer>1",
    "blanks after": GOOD + "\n" * LENGTH + "x",
    "long answer": "<think>a</think><answer>" + "1" * LENGTH + "</answer>x",
    "digits": "<think>a</think><answer>" + "1," * (LENGTH // 2) + "</answer>",
    "many answers": "<answer>1</answer>" * (LENGTH // 18),
    "nothing": "\x00" * LENGTH,
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_takes_linear_time(text: str) -> None:
    """A quadratic match over 200,000 characters takes minutes."""
    started = time.perf_counter()
    format_reward(text), answer_reward(text, "1", numbers_equal), number(text)
    assert time.perf_counter() - started < 1


def test_no_text_makes_a_reward_raise() -> None:
    rng = random.Random(0)
    pieces = [
        "<think>",
        "</think>",
        "<answer>",
        "</answer>",
        "1",
        ",",
        ".",
        "-",
        " ",
        "\u0663",
        "\ud800",
        "<",
        "e",
        "nan",
    ]
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        assert format_reward(text) in (0, 1)
        assert answer_reward(text, "1", numbers_equal) in (0, 1)
        value = number(text)
        assert value is None or math.isfinite(value)


@pytest.mark.parametrize(("given", "answer", "correct"), [
    (r"\frac{1}{2}", "0.5", True), ("0.5", r"\frac{1}{2}", True), (r"$\frac{1}{2}$", "1/2", True),
    ("18", "18", True), (r"\boxed{18}", "18", True), ("18", "$18$", True), ("19", "18", False), ("1", "18", False),
    ("x^2+1", "1+x^2", True), ("(1,2)", "(1, 2)", True), ("(2,1)", "(1,2)", False), (r"\sqrt{4}", "2", True),
])  # fmt: skip
def test_bigmath_compares_mathematically(given: str, answer: str, correct: bool) -> None:
    """A plain `<answer>18</answer>` scored 0 in the released code."""
    assert bigmath.is_correct(given, answer) is correct


@pytest.mark.parametrize("text", [
    "", " ", "\\", "$", "$$$", "\\frac", "\\frac{1}{", "garbage {{{", "\x00", "\ud800", "(" * 50, "{" * 200, "1/0",
    "%", "\\text{",
])  # fmt: skip
def test_bigmath_never_raises_on_what_it_cannot_parse(text: str) -> None:
    assert bigmath.is_correct(text, "18") is False
    assert bigmath.is_correct("18", text) is False


def test_bigmath_gives_up_in_time() -> None:
    started = time.perf_counter()
    assert bigmath.is_correct("10^{10^{10}}", "18") is False
    assert time.perf_counter() - started < 4 * bigmath.TIME_LIMIT_SECONDS
