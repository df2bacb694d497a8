"""Small programs that read standard input and write standard output, judged by tests in a sandbox.

The problems are made by rule (code_problems.py), or are the rows of `task.path`: `question`, and `tests`, a list of
`{"input": ..., "output": ...}`. A directory has train and test files; of a single file one question in 64 is held out
by hash. Outputs are compared line by line, but for spaces at the end of lines and empty lines at the end.

The answer is the program, as it is or in a block of ```; it gets the parts "answer" (every test passed) and "tests"
(the share that did, weighted by `task.code_io.tests_reward`).
"""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question, Questions, Scores, code_problems, code_sandbox
from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.data import Row, Source, as_text, read

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 2048, 256
PATIENCE = 3000  # draws without a new problem say that there are no more
MAX_PROGRAM_CHARACTERS = 20_000
COLUMNS = {"question": "question", "tests": "tests"}
_BLOCK = re.compile(r"```(?:python|python3|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def train(cfg: TaskConfig) -> list[Question]:
    """`cfg.train_questions` problems (0: 2048) whose shapes are not held out, or all of `task.path`."""
    return _questions(cfg, cfg.train_questions or TRAIN_QUESTIONS, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """256 held-out problems, or all there are at an easy level."""
    return _questions(cfg, HELDOUT_QUESTIONS, of_heldout=True)


def weights(cfg: TaskConfig) -> dict[str, float]:
    """The weight of the share of tests that a program passes."""
    return {"tests": cfg.code_io.tests_reward}


def _questions(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Question]:
    code_sandbox.check()
    if cfg.path is None:
        return _made(cfg, count, of_heldout)
    own_test = not Path(cfg.path).expanduser().is_file()
    source = Source(cfg.path, "default", "train", "test" if own_test else None, COLUMNS)

    def make(id: str, row: Row) -> Question:
        return Question(id, row.text("question"), "", _payload(cfg, _tests(row)))

    return read(cfg, source, of_heldout, make)


def _payload(cfg: TaskConfig, tests: Sequence[tuple[str, str]]) -> dict[str, Any]:
    limits = {"seconds": cfg.code_io.seconds, "memory_mib": cfg.code_io.memory_mib}
    return {"inputs": [given for given, _ in tests], "outputs": [output for _, output in tests], **limits}


def _tests(row: Row) -> list[tuple[str, str]]:
    column, found = row.columns["tests"], row.value("tests")
    if not isinstance(found, list) or not found:
        raise BadRow(f"has no list of tests in {column!r}")
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in found):
        raise BadRow(f"has a test without input or output in {column!r}")
    if not all(isinstance(test["input"], str) for test in found):
        raise BadRow(f"has a test in {column!r} whose input is no text")
    return [(test["input"], as_text(test["output"], column)) for test in found]


def _made(cfg: TaskConfig, count: int, of_heldout: bool) -> Questions:
    """`count` distinct problems, or as many as are found."""
    rng, found, since_new = random.Random(2510_11696), dict[str, Question | None](), 0
    while sum(question is not None for question in found.values()) < count and since_new < PATIENCE:
        problem = code_problems.draw_problem(rng, rng.randint(cfg.code_io.min_level, cfg.code_io.max_level))
        since_new += 1
        if problem.is_heldout == of_heldout and problem.id not in found:
            found[problem.id], since_new = _question(cfg, problem), 0
    return Questions(question for question in found.values() if question is not None)


def _question(cfg: TaskConfig, problem: code_problems.Problem) -> Question | None:
    """The question that poses a problem, with an example; None where no tests tell programs apart."""
    tests = code_problems.tests(problem, cfg.code_io.tests)
    if tests is None:
        return None
    (given, output), *hidden = tests
    text = f"{problem.text}\n\nExample input:\n{given}Example output:\n{output}"
    return Question(f"code_io-{problem.id}", text, "", _payload(cfg, hidden))


def program(completion: str) -> str | None:
    """The program in the final answer of a completion, out of its block of ``` if it has one; None where there is none
    or it is too long."""
    text = final_answer(completion)
    if text is None or len(text) > MAX_PROGRAM_CHARACTERS:
        return None
    block = _BLOCK.fullmatch(text)
    return block[1] if block else text


def grade(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Scores "format", "answer" (every test passed) and "tests" (the share that did)."""
    import numpy as np  # here: checking a command imports tasks too, and should not wait for it

    asked = [(program(text), question) for text, question in zip(texts, questions, strict=True)]
    distinct = list(dict.fromkeys((text, question) for text, question in asked if text is not None))
    passed = dict(zip(distinct, _shares(distinct), strict=True))
    share = np.array([passed[text, question] if text is not None else 0.0 for text, question in asked], np.float64)
    kept = np.array([keeps_format(text) for text in texts], np.float64)
    return {"format": kept, "answer": (share == 1).astype(np.float64), "tests": share}


def _shares(asked: Sequence[tuple[str, Question]]) -> list[float]:
    """Of each program the share of its question's tests that it passes."""
    payloads = [question.payload for _, question in asked]
    programs = [
        code_sandbox.Program(text, payload["inputs"], payload["seconds"], payload["memory_mib"])
        for (text, _), payload in zip(asked, payloads, strict=True)
    ]
    found = code_sandbox.run(programs) if programs else []
    return [
        sum(map(_same, outputs, payload["outputs"])) / len(outputs)
        for outputs, payload in zip(found, payloads, strict=True)
    ]


def _same(given: str | None, known: str) -> bool:
    return given is not None and _lines(given) == _lines(known)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
