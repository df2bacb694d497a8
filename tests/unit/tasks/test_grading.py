"""Scores of completions, hostile text included: pure, in batches, within limits of time and memory."""

import importlib
import random
import threading
import time

import numpy as np
import pytest

from qerl_lab.config.files import choices_of
from qerl_lab.tasks import Question, grading
from qerl_lab.tasks.answers import MAX_ANSWER_CHARACTERS
from qerl_lab.tasks.grading import grade_answers, grade_math, grade_numbers, keeps_format

GOOD = "<think>7+5=12.</think><answer>12</answer>"


def asking(answer: str) -> Question:
    return Question("", "?", answer)


def answered(text: str) -> str:
    return f"<think>x</think><answer>{text}</answer>"


def score(completion: str, answer: str) -> float:
    return grade_numbers([completion], [asking(answer)])["answer"].item()


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
    assert keeps_format(completion) == reward


def test_the_answer_needs_no_format() -> None:
    assert score(GOOD, "12") == 1
    assert score(GOOD, "13") == 0
    assert score("no think block, <answer>12.0</answer>", "12") == 1
    assert score("12", "12") == 0


def test_a_batch_is_graded_as_its_texts_are_one_by_one() -> None:
    texts = [GOOD, "<answer>12</answer>", "12", answered("13"), GOOD]
    questions = [asking(answer) for answer in ("12", "12", "12", "12", "13")]
    scores = grade_numbers(texts, questions)
    assert {part: values.tolist() for part, values in scores.items()} == {
        "format": [1, 0, 0, 1, 1], "answer": [1, 1, 0, 0, 0],
    }  # fmt: skip
    assert all(values.dtype == np.float64 for values in scores.values())
    assert scores["answer"].tolist() == [score(text, q.answer) for text, q in zip(texts, questions, strict=True)]
    assert {part: values.shape for part, values in grade_numbers([], []).items()} == {"format": (0,), "answer": (0,)}
    with pytest.raises(ValueError, match="zip"):
        grade_numbers(texts, questions[1:])


def test_a_pair_that_a_batch_repeats_is_compared_once() -> None:
    seen = []
    scores = grade_answers(
        [answered("1"), "no answer", answered("2"), answered("1")], [asking("1")] * 4,
        lambda pairs: [seen.append(pair) or pair[0] == pair[1] for pair in pairs],
    )  # fmt: skip
    assert seen == [("1", "1"), ("2", "1")]
    assert scores["answer"].tolist() == [1, 0, 0, 1]


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
    score(text, "1")
    assert time.perf_counter() - started < 1


def test_no_text_makes_a_grader_raise() -> None:
    rng = random.Random(0)
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    pieces = [*tags, "1", ",", ".", "-", " ", "\u0663", "\ud800", "<", "e", "nan"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(20_000)]
    for scores in grade_numbers(texts, [asking("1")] * len(texts)).values():
        assert set(scores.tolist()) <= {0.0, 1.0}


# --- mathematical equality


def test_grade_math_compares_mathematically() -> None:
    """A plain `<answer>18</answer>` scored 0 in the released code."""
    cases = [
        (r"\frac{1}{2}", "0.5", True), ("0.5", r"\frac{1}{2}", True), (r"$\frac{1}{2}$", "1/2", True),
        ("18", "18", True), (r"\boxed{18}", "18", True), ("18", "$18$", True), ("19", "18", False), ("1", "18", False),
        ("x^2+1", "1+x^2", True), ("(1,2)", "(1, 2)", True), ("(2,1)", "(1,2)", False), (r"\sqrt{4}", "2", True),
    ]  # fmt: skip
    scores = grade_math([answered(given) for given, _, _ in cases], [asking(answer) for _, answer, _ in cases])
    assert [(*pair, bool(right)) for (*pair, _), right in zip(cases, scores["answer"], strict=True)] == cases


def test_grade_math_scores_0_what_it_cannot_parse() -> None:
    texts = [
        " ", "\\", "$", "$$$", "\\frac", "\\frac{1}{", "garbage {{{", "\x00", "\ud800", "\u2028", "(" * 20, "1/0", "%",
        "\\text{", "18",
    ]  # fmt: skip
    texts, known = [*texts, *["18"] * len(texts)], ["18"] * len(texts) + texts
    scores = grade_math([answered(text) for text in texts], [asking(answer) for answer in known])
    assert [n for n, score in enumerate(scores["answer"], start=1) if score] == [len(texts) // 2, len(texts)]


def test_grade_math_gives_up_in_time_and_grades_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the main thread too, where math-verify's own limits raise."""
    bombs = [
        "9^{9^{9}}", "10^{10^{10}}", "9**9**9", "((9!)!)!",
        r"\frac{1}{" * 18 + "2" + "}" * 18, "{" * 99 + "1" + "}" * 99, "2^" * 99 + "2",
    ]  # fmt: skip
    assert max(map(len, bombs)) <= MAX_ANSWER_CHARACTERS
    monkeypatch.setattr(grading, "SECONDS", 1.0)
    texts, found = [answered(text) for text in ["18", *bombs, "19", "18.0"]], []
    thread = threading.Thread(target=lambda: found.append(grade_math(texts, [asking("18")] * len(texts))))
    thread.start()
    thread.join(timeout=240)
    assert found[0]["answer"].tolist() == [1, *[0] * len(bombs), 0, 1]


@pytest.mark.parametrize("name", choices_of("task"))
def test_every_task_has_the_two_parts_that_an_evaluation_reads(name: str) -> None:
    task = importlib.import_module(f"qerl_lab.tasks.{name}")
    scores = task.grade([GOOD, "12", ""], [asking("12")] * 3)
    assert {part: values.tolist() for part, values in scores.items()} == {"format": [1, 0, 0], "answer": [1, 0, 0]}
