"""Question sets of mathematics on the Hugging Face hub: their columns, and how a row becomes a question.

`task.path` reads the same columns from local files. All are graded by `grading.grade_math`. A function that makes a
question from a row raises BadRow if the row has no question, or has an answer of another kind.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks.grading import grade_math, number
from qerl_lab.tasks.question_files import Make, Row, Source, checked_text, read
from qerl_lab.tasks.questions import BadRow, Question, Questions

SOURCES = {
    # GSM8K, grade-school mathematics (MIT): the number follows `####`, after the solution with one step per line
    "gsm8k": Source("openai/gsm8k", "main", "train", "test", {"question": "question", "answer": "answer"}),
    # competition problems with LaTeX answers; a configuration for each value of `task.bigmath.levels`
    "bigmath": Source("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "train", None,
                      {"question": "prompt", "answer": "solution"}),
    # the training set of DAPO (2503.14476): numeric answers; repeats every row about a hundred times
    "dapo_math": Source("BytedTsinghua-SIA/DAPO-Math-17k", "default", "train", None,
                        {"question": "prompt", "answer": "reward_model.ground_truth", "id": "extra_info.index"},
                        file="dapo-math-17k"),
    # for evaluation only
    "math500": Source("HuggingFaceH4/MATH-500", "default", None, "test",
                      {"question": "problem", "answer": "answer", "id": "unique_id"}),
    "aime24": Source("HuggingFaceH4/aime_2024", "default", None, "train",
                     {"question": "problem", "answer": "answer", "id": "id"}),
    "aime25": Source("math-ai/aime25", "default", None, "test",
                     {"question": "problem", "answer": "answer", "id": "id"}),
    "amc23": Source("math-ai/amc23", "default", None, "test",
                    {"question": "question", "answer": "answer", "id": "id"}),
}  # fmt: skip
BIGMATH_CONFIGS = {"3-5": "level_3_4_5", "4-5": "level_4_5", "all": "all"}
# DAPO's request for a last line `Answer: ...`, removed because `task.instruction` asks for another format
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def functions(name: str) -> dict[str, Callable[..., Any]]:
    """Return the task functions of the question set `name`, a key of SOURCES, in a dict with keys such as "heldout".

    The docstring of `qerl_lab.tasks` describes these functions.
    """
    found: dict[str, Callable[..., Any]] = {"heldout": lambda cfg: _read(cfg, of_heldout=True), "grade": grade_math}
    if SOURCES[name].train:
        found["train"] = lambda cfg: _read(cfg, of_heldout=False)
    if name == "gsm8k":
        found["worked"] = lambda cfg: _read_gsm8k(cfg, _gsm8k_worked, of_heldout=False)
    return found


def _read(cfg: TaskConfig, of_heldout: bool) -> Questions:
    """Read the training or held-out questions of the set `cfg.name`. Raises ConfigError if they cannot be read."""
    if cfg.name == "gsm8k":
        return _read_gsm8k(cfg, _gsm8k, of_heldout)
    if cfg.name == "bigmath":
        return _read_bigmath(cfg, of_heldout)
    return read(cfg, SOURCES[cfg.name], of_heldout, _MAKERS[cfg.name], cfg.name)


def _read_gsm8k(cfg: TaskConfig, make: Make, of_heldout: bool) -> Questions:
    """Read the GSM8K questions that have a solution of at most `task.gsm8k.max_steps` lines; all if that key is null.

    `make` makes a question from an id and a row. Raises ConfigError if no solution is so short.
    """
    most, steps = cfg.gsm8k.max_steps, list[int]()

    def make_if_short(id: str, row: Row) -> Question | None:
        question = make(id, row)  # first, so that a bad row is counted whatever its steps
        if most is None:
            return question
        solution = row.text("answer").rpartition("####")[0]
        steps.append(sum(bool(line.strip()) for line in solution.splitlines()))
        if steps[-1] == 0:
            raise BadRow(f"has no solution, and task.gsm8k.max_steps={most} counts its steps")
        return question if steps[-1] <= most else None

    found = read(cfg, SOURCES["gsm8k"], of_heldout, make_if_short, cfg.name)
    if steps and not found:
        raise ConfigError(
            f"task.gsm8k.max_steps={most} leaves out all {len(steps):,} questions; the shortest solution has "
            f"{min(steps)} steps. Type task.gsm8k.max_steps={min(steps)}."
        )
    return found


def _gsm8k(id: str, row: Row) -> Question:
    """Make a question from a row of GSM8K. The answer is the number after `####`. Raises BadRow without a number."""
    answer = row.text("answer")
    final = answer.rpartition("####")[2].strip()
    if "####" not in answer or number(final) is None:
        raise BadRow(f"has no number after `####` (write for example `#### 72`): {answer[-80:]!r}")
    return Question(id, row.text("question"), final.replace(",", ""))


def _gsm8k_worked(id: str, row: Row) -> Question:
    """Make a question from a row of GSM8K, with the solution as `<think>..</think><answer>..</answer>` in its payload.

    Removes calculator annotations (`<<48/2=24>>`). Raises BadRow if the rest is blank or contains `<`.
    """
    question, solution = _gsm8k(id, row), row.text("answer").rpartition("####")[0]
    steps = re.sub(r"<<[^<>]*>>", "", solution).strip()
    if not steps or "<" in steps:  # a "<" would clash with the format's tags
        raise BadRow(f"has no solution that can be taught: {solution[:80]!r}")
    return replace(question, payload={"solution": f"<think>{steps}</think><answer>{question.answer}</answer>"})


def _read_bigmath(cfg: TaskConfig, of_heldout: bool) -> Questions:
    """Read the Big-Math questions of the levels `task.bigmath.levels`. Rows without a column `level` are all kept.

    If task.path is set and levels are chosen, a note for the user counts the rows without a level.
    """
    levels, without_level = cfg.bigmath.levels, list[str]()

    def make_if_chosen(id: str, row: Row) -> Question | None:
        if "level" not in row.values:
            without_level.append(id)
            return _question_with_latex_answer(id, row)
        if levels == "all":
            return _question_with_latex_answer(id, row)
        level = str(row.values["level"]).removeprefix("Level ").removesuffix(".0")  # 5.0: a numeric column with gaps
        if level not in ("1", "2", "3", "4", "5"):
            raise BadRow(f"has the level {level[:80]!r}; levels are 1 to 5")
        return _question_with_latex_answer(id, row) if level >= levels[0] else None

    source = replace(SOURCES["bigmath"], hub_config=BIGMATH_CONFIGS[levels])
    found = read(cfg, source, of_heldout, make_if_chosen, cfg.name)
    if without_level and levels != "all" and cfg.path is not None:
        found.notes.append(
            f"{len(without_level):,} rows have no level, so that task.bigmath.levels={levels} left none of them out"
        )
    return found


def _dapo_math(id: str, row: Row) -> Question:
    """Make a question from a row of DAPO, without DAPO's request for an answer format.

    The column has the question as a text, or as the last of a list of chat messages. Raises BadRow if that message is
    not the user's, if the question is blank, or if the answer is no number.
    """
    column, value = row.columns["question"], row.value("question")
    if isinstance(value, list):
        last = value[-1] if value else None
        if not isinstance(last, dict) or last.get("role") != "user":
            raise BadRow(f"has no message of a user at the end of {column!r}")
        value = last.get("content")
    prompt = checked_text(value, column).removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER)
    return Question(id, checked_text(prompt, column), _number(row))


def _question_with_latex_answer(id: str, row: Row) -> Question:
    """Make a question from a row, with the answer as it is written, a text or a number.

    Raises BadRow if the question or the answer is missing.
    """
    return Question(id, row.text("question"), row.number_or_text("answer"))


def _question_with_number(id: str, row: Row) -> Question:
    """Make a question from a row with a number as answer. Raises BadRow if the answer is no number."""
    return Question(id, row.text("question"), _number(row))


def _number(row: Row) -> str:
    """Return the answer of a row as it is written. Raises BadRow if the answer is no number."""
    found = row.number_or_text("answer")
    if number(found) is None:
        raise BadRow(f"has no number in {row.columns['answer']!r}: {found[:80]!r}")
    return found


_MAKERS: dict[str, Make] = {
    "dapo_math": _dapo_math, "math500": _question_with_latex_answer,
    **dict.fromkeys(("aime24", "aime25", "amc23"), _question_with_number),
}  # fmt: skip
