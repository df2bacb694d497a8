"""Small programs that read standard input and write standard output, tested in a sandbox.

Problems are generated (code_problems.py) or read from `task.path`: rows with `question` and `tests`, a list of
`{"input": ..., "output": ...}`. A directory has train and test files; of a single file one question in 64 is held out
by hash. Outputs are compared line by line, ignoring trailing spaces and empty lines at the end.

The answer is the program, alone or in a ``` block with any text around it. Parts: "answer" (every test passed) and
"tests" (the share of tests passed, weighted by `task.code_io.tests_reward`).
"""

import itertools
import random
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import code_problems, code_sandbox
from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.code_problems import Problem
from qerl_lab.tasks.question_files import Row, Source, as_text, read
from qerl_lab.tasks.questions import BadRow, Question, Questions, Scores

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 2048, 256
HELDOUT_OF_A_LEVEL = 320  # more than HELDOUT_QUESTIONS, because a few problems have no tests
SEED, PATIENCE = 2510_11696, 3000  # stop after PATIENCE draws without a new problem
LEVELS = tuple(code_problems.FAMILIES)
MAX_PROGRAM_CHARACTERS = 20_000
COLUMNS = {"question": "question", "tests": "tests"}
# A block ends at ``` at the start of a line or the end of the text: a program may contain ``` elsewhere.
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python|python3|py)?[ \t]*\r?\n(.*?)(?:^[ \t]*```|```\s*\Z)",
    re.DOTALL | re.MULTILINE | re.IGNORECASE,
)


def train(cfg: TaskConfig) -> list[Question]:
    """Return `cfg.train_questions` (0: 2048) problems, none equal to a held-out one, or those of `task.path`."""
    return _questions(cfg, cfg.train_questions or TRAIN_QUESTIONS, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return 256 held-out problems, or all there are at an easy level."""
    return _questions(cfg, HELDOUT_QUESTIONS, of_heldout=True)


def weights(cfg: TaskConfig) -> dict[str, float]:
    """Return the weight of the share of tests passed."""
    return {"tests": cfg.code_io.tests_reward}


def _questions(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Question]:
    code_sandbox.check()
    if cfg.path is None:
        return _made(cfg, count, heldout_problems(cfg) if of_heldout else training_problems(cfg))
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


def _made(cfg: TaskConfig, count: int, problems: Iterable[Problem]) -> Questions:
    """Return the questions of the first `count` problems that have one."""
    posed = (question for problem in problems if (question := _question(cfg, problem)) is not None)
    return Questions(itertools.islice(posed, count))


def training_problems(cfg: TaskConfig) -> Iterator[Problem]:
    """Yield training problems: no held-out shape, and no behaviour of a held-out problem of any level."""
    known = {problem.behaviour for level in LEVELS for problem in _heldout_of(level)}
    rng = random.Random(SEED)
    return _distinct(lambda: code_problems.draw_problem(rng, rng.choice(_levels(cfg))), of_heldout=False, known=known)


def heldout_problems(cfg: TaskConfig) -> Iterator[Problem]:
    """Yield the held-out problems of the configured levels, mixed, without equal behaviour."""
    rng, known = random.Random(SEED), set[Hashable]()
    left = {level: list(reversed(_heldout_of(level))) for level in _levels(cfg)}
    while some := [level for level, problems in left.items() if problems]:
        problem = left[rng.choice(some)].pop()
        if problem.behaviour not in known:
            known.add(problem.behaviour)
            yield problem


@cache
def _heldout_of(level: int) -> tuple[Problem, ...]:
    """Return the held-out problems of a level, independent of other settings, so that no setting trains on them."""
    rng = random.Random(f"{SEED} {level}")
    found = _distinct(lambda: code_problems.draw_problem(rng, level), of_heldout=True, known=set())
    return tuple(itertools.islice(found, HELDOUT_OF_A_LEVEL))


def _levels(cfg: TaskConfig) -> list[int]:
    return [level for level in LEVELS if cfg.code_io.min_level <= level <= cfg.code_io.max_level]


def _distinct(draw: Callable[[], Problem], of_heldout: bool, known: set[Hashable]) -> Iterator[Problem]:
    """Yield drawn problems of one role with new behaviour, until PATIENCE draws find none.

    Args:
        known: behaviours to exclude; new ones are added.
    """
    drawn, since_new = set[str](), 0
    while since_new < PATIENCE:
        problem, since_new = draw(), since_new + 1
        if problem.id in drawn or problem.is_heldout != of_heldout:
            continue
        drawn.add(problem.id)
        if problem.behaviour not in known:
            known.add(problem.behaviour)
            since_new = 0
            yield problem


def _question(cfg: TaskConfig, problem: Problem) -> Question | None:
    """Return a problem as a question with an example; None if no tests distinguish programs."""
    tests = code_problems.tests(problem, cfg.code_io.tests)
    if tests is None:
        return None
    (given, output), *hidden = tests
    text = f"{problem.text}\n\nExample input:\n{given}Example output:\n{output}"
    return Question(f"code_io-{problem.id}", text, "", _payload(cfg, hidden))


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
    passed = dict(zip(distinct, _shares(distinct), strict=True))
    share = np.array([passed[text, question] if text is not None else 0.0 for text, question in asked], np.float64)
    kept = np.array([keeps_format(text) for text in texts], np.float64)
    return {"format": kept, "answer": (share == 1).astype(np.float64), "tests": share}


def _shares(asked: Sequence[tuple[str, Question]]) -> list[float]:
    """Return for each program the share of its question's tests that it passes."""
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
    """Return whether two outputs are equal, ignoring trailing spaces and empty lines at the end."""
    return given is not None and _lines(given) == _lines(known)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
