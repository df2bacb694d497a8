"""Worked solutions: each is graded as right, in the format, by its own task."""

import json
from pathlib import Path

import pytest

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig


@pytest.fixture
def gsm8k(tmp_path: Path) -> TaskConfig:
    answers = [
        "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 1,000 = <<1000>>1,000 in all.\n#### 1,000",
        "It is $<<2*3=6>>6.\n#### 6",
    ]
    rows = [{"question": f"Question {n}?", "answer": answer} for n, answer in enumerate(answers * 100)]
    rows.append({"question": "A bad one?", "answer": "1 < 2, so <<a 3\n#### 3"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "Question 1?", "answer": "#### 6"}) + "\n")
    return TaskConfig(name="gsm8k", path=str(tmp_path))


def test_a_solution_of_gsm8k_has_no_marks_of_a_calculator(gsm8k: TaskConfig) -> None:
    found = tasks.load(gsm8k, training="worked")
    assert found.train[0].payload["solution"] == (
        "<think>She sold 48/2 = 24 clips.\nThat is 1,000 = 1,000 in all.</think><answer>1000</answer>"
    )
    assert not {"A bad one?", "Question 1?"} & {question.prompt for question in found.train}, "the last is held out"
    assert "1 of 201 rows are bad and left out" in found.warnings[0]


def test_every_solution_earns_everything_and_no_question_gains_or_loses(gsm8k: TaskConfig) -> None:
    found, usual = tasks.load(gsm8k, training="worked"), tasks.load(gsm8k)
    scores = found.grade([question.payload["solution"] for question in found.train], found.train)
    assert (scores["format"].min(), scores["answer"].min()) == (1, 1)
    kept = {(question.id, question.prompt, question.answer) for question in found.train}
    assert kept <= {(question.id, question.prompt, question.answer) for question in usual.train}
    assert len(usual.train) - len(kept) == 1  # the bad one


def test_a_task_without_solutions_says_which_have_some() -> None:
    with pytest.raises(ConfigError, match=r"task=aime24 has no worked solutions; allowed: .*gsm8k"):
        tasks.load(TaskConfig(name="aime24"), training="worked")
