"""GSM8K: 7,473 training and 1,319 test problems of grade-school mathematics (openai/grade-school-math, MIT).

Columns `question` and `answer`. The answer's number follows `####`, after the solution with one step per line.
`task.gsm8k.max_steps` leaves out questions with more steps, from training and test.
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
    """Return the training problems."""
    return _questions(cfg, False, _question)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return the official test problems."""
    return _questions(cfg, True, _question)


def worked(cfg: TaskConfig) -> list[Question]:
    """Return the training problems with solutions, without calculator annotations (`<<48/2=24>>`)."""
    return _questions(cfg, False, _worked)


def _questions(cfg: TaskConfig, of_heldout: bool, make: Make) -> Questions:
    """Return the questions with at most `task.gsm8k.max_steps` steps. Raises ConfigError if none are left."""
    most, steps, role = cfg.gsm8k.max_steps, list[int](), "held-out" if of_heldout else "training"

    def short(id: str, row: Row) -> Question | None:
        question = make(id, row)  # first, so that a bad row is counted whatever its steps
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
    """Return the solution before `####`."""
    return row.text("answer").rpartition("####")[0]


def _worked(id: str, row: Row) -> Question:
    """Make a question with its solution in the paper's format. Raises BadRow."""
    question, rationale = _question(id, row), _rationale(row)
    steps = re.sub(r"<<[^<>]*>>", "", rationale).strip()
    if not steps or "<" in steps:  # a "<" would clash with the format's tags
        raise BadRow(f"has no solution that can be taught: {rationale[:80]!r}")
    return replace(question, payload={"solution": f"<think>{steps}</think><answer>{question.answer}</answer>"})


def _question(id: str, row: Row) -> Question:
    answer = row.text("answer")
    gold = answer.rpartition("####")[2].strip()
    if "####" not in answer or number(gold) is None:
        raise BadRow(f"has no number after `####`: {answer[-80:]!r}")
    return Question(id, row.text("question"), gold.replace(",", ""))
