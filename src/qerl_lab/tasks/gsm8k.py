"""GSM8K: 7,473 training and 1,319 test problems of grade-school mathematics (openai/grade-school-math, MIT).

Columns `question` and `answer`, whose gold number stands after `####`, below the solution with a step a line.
`task.gsm8k.max_steps` leaves out the questions with more steps, of every role.
"""

import re
from dataclasses import replace

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question, Questions
from qerl_lab.tasks.answers import number
from qerl_lab.tasks.data import Make, Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout", "train", "worked"]

SOURCE = Source("openai/gsm8k", "main", "train", "test", {"question": "question", "answer": "answer"})


def train(cfg: TaskConfig) -> list[Question]:
    """The training problems."""
    return _questions(cfg, False, _question)


def heldout(cfg: TaskConfig) -> list[Question]:
    """The official test problems."""
    return _questions(cfg, True, _question)


def worked(cfg: TaskConfig) -> list[Question]:
    """The training problems with their solutions, without the marks of a calculator (`<<48/2=24>>`)."""
    return _questions(cfg, False, _worked)


def _questions(cfg: TaskConfig, of_heldout: bool, make: Make) -> Questions:
    """Those of at most `task.gsm8k.max_steps`. Raises ConfigError where that leaves out all."""
    most, steps, role = cfg.gsm8k.max_steps, list[int](), "held-out" if of_heldout else "training"

    def short(id: str, row: Row) -> Question | None:
        question = make(id, row)  # a bad row is counted as one, however many steps it has
        steps.append(sum(bool(line.strip()) for line in _rationale(row).splitlines()))
        return question if most is None or steps[-1] <= most else None

    found = read(cfg, SOURCE, of_heldout, short)
    if most is not None and steps and not found:
        raise ConfigError(
            f"task.gsm8k.max_steps={most} leaves out all {len(steps):,} {role} questions; the shortest solution has "
            f"{min(steps)} steps. Type task.gsm8k.max_steps={min(steps)}, or leave it out."
        )
    if most is not None and (without := steps.count(0)):
        found.notes.append(
            f"{without:,} rows have no solution, so that task.gsm8k.max_steps={most} left none of them out"
        )
    return found


def _rationale(row: Row) -> str:
    return row.text("answer").rpartition("####")[0]


def _worked(id: str, row: Row) -> Question:
    question, rationale = _question(id, row), _rationale(row)
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
