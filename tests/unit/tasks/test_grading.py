"""Scores of completions: in batches, for any text, within limits of time."""

import random
import threading

import numpy as np
import pytest

from qerl_lab.tasks import Question, grading
from qerl_lab.tasks.grading import grade_math, judge

GOOD = "<think>7+5=12.</think><answer>12</answer>"


def asking(answer: str) -> Question:
    return Question("", "?", answer)


def answered(text: str) -> str:
    return f"<think>x</think><answer>{text}</answer>"


def test_a_batch_gets_the_scores_of_its_texts_one_by_one() -> None:
    """An answer counts without the format. An unreadable answer is wrong and counted as unparsed."""
    unreadable = [answered(text) for text in ("{{{", r"\int_0^{} x dx", "1" * 2000 + "x")]
    texts = [GOOD, "<answer>12.0</answer>", "12", answered("13"), GOOD, *unreadable]
    questions = [asking(answer) for answer in ("12", "12", "12", "12", "13", "18", "18", "18")]
    found = grade_math(texts, questions)
    assert {part: values.tolist() for part, values in found.items()} == {
        "format": [1, 0, 0, 1, 1, 1, 1, 1],
        "answer": [1, 1, 0, 0, 0, 0, 0, 0],
        "unparsed": [0, 0, 0, 0, 0, 1, 1, 1],
    }
    assert all(values.dtype == np.float64 for values in found.values())
    alone = [grade_math([text], [question]) for text, question in zip(texts, questions, strict=True)]
    assert all(found[part].tolist() == [score[part].item() for score in alone] for part in found)
    assert {part: values.shape for part, values in grade_math([], []).items()} == dict.fromkeys(found, (0,))
    with pytest.raises(ValueError, match="zip"):
        grade_math(texts, questions[1:])


def test_a_pair_that_a_batch_repeats_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, verdicts = [], {"1": True, "2": False, "3": None}
    monkeypatch.setattr(grading, "judge", lambda *pair: seen.append(pair) or verdicts[pair[0]])
    texts = [answered("1"), "no answer", answered("2"), answered("1"), answered("3")]
    found = grade_math(texts, [asking("1")] * 5)
    assert seen == [("1", "1"), ("2", "1"), ("3", "1")]
    assert found["answer"].tolist() == [1, 0, 0, 1, 0]
    assert found["unparsed"].tolist() == [0, 0, 0, 0, 1]


def test_no_text_makes_a_grader_raise() -> None:
    rng = random.Random(0)
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    pieces = [*tags, *tags, "1", ",", ".", "-", " ", "\u0663", "\ud800", "<", "e", "nan", "\\frac", "{", "}"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(20_000)]
    for values in grade_math(texts, [asking("1")] * len(texts)).values():
        assert set(values.tolist()) <= {0.0, 1.0}


def test_math_verify_works_outside_of_the_main_thread_and_within_its_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """math-verify's own limits raise in such a thread. A pair over the limit is unparsed; the next one is compared."""
    monkeypatch.setattr(grading, "LIBRARY_SECONDS", 1.0)
    bomb, found = r"\sum_{k=1}^{99} \sum_{n=1}^{999} k^{99} n^{999}", []
    pairs = [(r"\sum_{k=1}^{5} k", "15"), (bomb, "15"), (r"\sum_{k=1}^{5} k", "16"), (r"\int_0^1 2x \, dx", "1")]
    thread = threading.Thread(target=lambda: found.extend(judge(*pair) for pair in pairs))
    thread.start()
    thread.join(timeout=120)
    assert found == [True, None, False, True]
