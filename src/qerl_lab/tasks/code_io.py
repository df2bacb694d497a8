"""Programs that read standard input and write standard output, tested in a sandbox (docs/tasks.md).

Problems are rows of `task.path` with `question` and `tests`, a list of `{"input": ..., "output": ...}`.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import code_sandbox
from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.question_files import Row, Source, read
from qerl_lab.tasks.questions import BadRow, Question, Questions, Scores

MAX_PROGRAM_CHARACTERS = 20_000
COLUMNS = {"question": "question", "tests": "tests"}
_PYTHON = ("python", "python3", "py", "py3")
# A block has its language behind the opening ```. It ends at ``` at the start of a line, which with a word behind it
# opens the next block, or at the end of the text: a program may contain ``` elsewhere.
_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*([^\s`]*)[^\n`]*\n(.*?)(?:(?=^[ \t]*```[ \t]*\w)|^[ \t]*```|```\s*\Z)",
    re.DOTALL | re.MULTILINE,
)


def weights(cfg: TaskConfig) -> dict[str, float]:
    """Return the reward weight of "tests", the share of tests passed: `task.code_io.tests_reward`."""
    return {"tests": cfg.code_io.tests_reward}


def _read(cfg: TaskConfig, of_heldout: bool) -> Questions:
    """Read the training or held-out problems in `task.path`, with tests and limits (seconds, MiB) as payload.

    Raises ConfigError if task.path is not set or cannot be read, or if this machine cannot sandbox programs.
    """
    if cfg.path is None:
        raise ConfigError(
            "task=code_io reads its problems from task.path, which is not set. Type task.path=DIRECTORY with "
            "train.jsonl and test.jsonl; docs/tasks.md shows a row."
        )
    code_sandbox.check()
    is_one_file = Path(cfg.path).expanduser().is_file()
    source = Source(cfg.path, "default", "train", None if is_one_file else "test", COLUMNS)
    limits = {"seconds": cfg.code_io.seconds, "memory_mib": cfg.code_io.memory_mib}

    def make(id: str, row: Row) -> Question:
        tests, column = row.value("tests"), row.columns["tests"]
        if not isinstance(tests, list) or not tests:
            raise BadRow(f"has no list of tests in {column!r}")
        for test in tests:
            given, output = (test.get("input"), test.get("output")) if isinstance(test, dict) else (None, None)
            if not (isinstance(given, str) and isinstance(output, str) and output.strip()):
                raise BadRow(f"has a test without an input and an output of text in {column!r}: {test!r:.80}")
        inputs, outputs = [test["input"] for test in tests], [test["output"] for test in tests]
        return Question(id, row.text("question"), "", {"inputs": inputs, "outputs": outputs, **limits})

    return read(cfg, source, of_heldout, make, cfg.name)


train, heldout = partial(_read, of_heldout=False), partial(_read, of_heldout=True)


def extract_program(completion: str) -> str | None:
    """Return the program in the final answer: its last ``` block, or the whole answer if it has no such block.

    Blocks marked as Python come before blocks without a language, and these before all others. Returns None if the
    completion has no final answer, or if the answer is over MAX_PROGRAM_CHARACTERS long.
    """
    text = final_answer(completion)
    if text is None or len(text) > MAX_PROGRAM_CHARACTERS:
        return None
    blocks: list[tuple[str, str]] = _BLOCK.findall(text)
    in_python = [block for language, block in blocks if language.lower() in _PYTHON]
    unmarked = [block for language, block in blocks if not language]
    others = [block for _, block in blocks]
    return (in_python or unmarked or others or [text])[-1]


def grade(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return the scores "format", "answer" and "tests" of completions, each of shape [len(texts)].

    "format" is 0 or 1, "answer" is 1 if every test passed, else 0, and "tests" is the share of tests passed.
    Completions with the same program for the same question share one run of the program.
    """
    import numpy as np  # imported here, because checking a command does not need it

    answers = [(extract_program(text), question) for text, question in zip(texts, questions, strict=True)]
    programs: dict[tuple[str | None, Question], code_sandbox.Program] = {}
    for code, question in answers:
        if code is not None:
            tests = question.payload
            programs[code, question] = code_sandbox.Program(
                code, tests["inputs"], tests["seconds"], tests["memory_mib"]
            )
    outputs = dict(zip(programs, code_sandbox.run(list(programs.values())), strict=True))
    share = np.zeros(len(texts))
    for n, (code, question) in enumerate(answers):
        if code is not None:
            pairs = zip(outputs[code, question], question.payload["outputs"], strict=True)
            share[n] = np.mean(
                [output is not None and _lines(output) == _lines(expected) for output, expected in pairs]
            )
    kept = np.array([keeps_format(text) for text in texts], np.float64)
    return {"format": kept, "answer": (share == 1).astype(np.float64), "tests": share}


def _lines(text: str) -> list[str]:
    """Split a text into lines, without spaces at the end of lines and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]
