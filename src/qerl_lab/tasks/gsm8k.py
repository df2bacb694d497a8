"""GSM8K: 7,473 training and 1,319 test problems of grade-school mathematics (openai/grade-school-math, MIT).

Columns `question` and `answer`, whose gold number stands after `####`.
"""

import re
from dataclasses import replace

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question
from qerl_lab.tasks.answers import number
from qerl_lab.tasks.data import Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout", "train", "worked"]

SOURCE = Source("openai/gsm8k", "main", "train", "test", {"question": "question", "answer": "answer"})


def train(cfg: TaskConfig) -> list[Question]:
    """The training problems."""
    return read(cfg, SOURCE, False, _question)


def heldout(cfg: TaskConfig) -> list[Question]:
    """The official test problems."""
    return read(cfg, SOURCE, True, _question)


def worked(cfg: TaskConfig) -> list[Question]:
    """The training problems with their solutions, without the marks of a calculator (`<<48/2=24>>`)."""
    return read(cfg, SOURCE, False, _worked)


def _worked(id: str, row: Row) -> Question:
    question, rationale = _question(id, row), row.text("answer").rpartition("####")[0]
    steps = re.sub(r"<<[^<>]*>>", "", rationale).strip()
    if not steps or "<" in steps:  # it would be one tag among those of the format
        raise BadRow(f"has no solution that can be taught: {rationale[:80]!r}")
    return replace(question, payload={"solution": f"<think>{steps}</think><answer>{question.answer}</answer>"})


def _question(id: str, row: Row) -> Question:
    answer = row.text("answer")
    gold = answer.rpartition("####")[2].strip()
    if "####" not in answer or number(gold) is None:
        raise BadRow(f"has no number after `####`: {answer[-80:]!r}")
    return Question(id, row.text("question"), gold.replace(",", ""))
