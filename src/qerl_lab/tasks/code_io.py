"""Small programs that read standard input and write standard output, tested in a sandbox.

Problems are generated (code_problems.py) or read from `task.path`: rows with `question` and `tests`, a list of
`{"input": ..., "output": ...}`. A directory has train and test files; of a single file one question in 64 is held out
by hash. Outputs are compared line by line, ignoring trailing spaces and empty lines at the end.

The answer is the program, alone or in a ``` block with any text around it. Parts: "answer" (every test passed) and
"tests" (the share of tests passed, weighted by `task.code_io.tests_reward`).
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import code_problems, code_sandbox
from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.question_files import Row, Source, as_text, read
from qerl_lab.tasks.questions import BadRow, Question, Questions, Scores

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 2048, 256
MAX_PROGRAM_CHARACTERS = 20_000
COLUMNS = {"question": "question", "tests": "tests"}
# A block ends at ``` at the start of a line or the end of the text: a program may contain ``` elsewhere.
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python|python3|py)?[ \t]*\r?\n(.*?)(?:^[ \t]*```|```\s*\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def train(cfg: TaskConfig) -> list[Question]:
    """Return `cfg.train_questions` (0: 2048) problems, none equal to a held-out one, or the problems in `task.path`."""
    return _questions(cfg, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return 256 held-out problems, or all there are at an easy level."""
    return _questions(cfg, of_heldout=True)


def weights(cfg: TaskConfig) -> dict[str, float]:
    """Return the weight of the share of tests passed."""
    return {"tests": cfg.code_io.tests_reward}


def _questions(cfg: TaskConfig, of_heldout: bool) -> list[Question]:
    code_sandbox.check()
    if cfg.path is None:
        return _generate_questions(cfg, of_heldout)
    own_test = not Path(cfg.path).expanduser().is_file()
    source = Source(cfg.path, "default", "train", "test" if own_test else None, COLUMNS)

    def make(id: str, row: Row) -> Question:
        return Question(id, row.text("question"), "", _payload(cfg, _tests(row)))

    return read(cfg, source, of_heldout, make)


def _payload(cfg: TaskConfig, tests: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return what `grade` needs: inputs, expected outputs and limits."""
    limits = {"seconds": cfg.code_io.seconds, "memory_mib": cfg.code_io.memory_mib}
    return {"inputs": [given for given, _ in tests], "outputs": [output for _, output in tests], **limits}


def _tests(row: Row) -> list[tuple[str, str]]:
    """Parse the tests of a row. Raises BadRow."""
    column, found = row.columns["tests"], row.value("tests")
    if not isinstance(found, list) or not found:
        raise BadRow(f"has no list of tests in {column!r}")
    if not all(isinstance(test, dict) and {"input", "output"} <= test.keys() for test in found):
        raise BadRow(f"has a test without input or output in {column!r}")
    if not all(isinstance(test["input"], str) for test in found):
        raise BadRow(f"has a test in {column!r} whose input is no text")
    return [(test["input"], as_text(test["output"], column)) for test in found]


def _generate_questions(cfg: TaskConfig, of_heldout: bool) -> Questions:
    """Generate problems and show one example test in each question. Skip problems without tests."""
    levels = [n for n in code_problems.STEPS_OF_LEVEL if cfg.code_io.min_level <= n <= cfg.code_io.max_level]
    count = HELDOUT_QUESTIONS if of_heldout else cfg.train_questions or TRAIN_QUESTIONS
    found = Questions([])
    for problem in code_problems.heldout(levels) if of_heldout else code_problems.training(levels):
        if len(found) == count:
            break
        if (tests := code_problems.tests(problem, cfg.code_io.tests)) is not None:
            (given, output), *hidden = tests
            text = f"{problem.text}\n\nExample input:\n{given}Example output:\n{output}"
            found.append(Question(f"code_io-{problem.id}", text, "", _payload(cfg, hidden)))
    return found


def program(completion: str) -> str | None:
    """Extract the program from a completion's final answer: the last ``` block, or the whole answer without one.

    Returns None without an answer or if it is too long.
    """
    text = final_answer(completion)
    if text is None or len(text) > MAX_PROGRAM_CHARACTERS:
        return None
    blocks: list[str] = _BLOCK.findall(text)
    return blocks[-1] if blocks else text


def grade(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return scores "format", "answer" (every test passed) and "tests" (the share passed)."""
    import numpy as np  # imported here, because checking a command does not need it

    asked = [(program(text), question) for text, question in zip(texts, questions, strict=True)]
    distinct = list(dict.fromkeys((text, question) for text, question in asked if text is not None))
    passed = dict(zip(distinct, _passed_shares(distinct), strict=True))
    share = np.array([passed[text, question] if text is not None else 0.0 for text, question in asked], np.float64)
    kept = np.array([keeps_format(text) for text in texts], np.float64)
    return {"format": kept, "answer": (share == 1).astype(np.float64), "tests": share}


def _passed_shares(asked: Sequence[tuple[str, Question]]) -> list[float]:
    """Return for each program the share of its question's tests that it passes."""
    payloads = [question.payload for _, question in asked]
    programs = [
        code_sandbox.Program(text, payload["inputs"], payload["seconds"], payload["memory_mib"])
        for (text, _), payload in zip(asked, payloads, strict=True)
    ]
    found = code_sandbox.run(programs) if programs else []
    return [
        sum(map(_same_output, outputs, payload["outputs"])) / len(outputs)
        for outputs, payload in zip(found, payloads, strict=True)
    ]


def _same_output(given: str | None, known: str) -> bool:
    """Return whether two outputs are equal, ignoring trailing spaces and empty lines at the end."""
    return given is not None and _lines(given) == _lines(known)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
