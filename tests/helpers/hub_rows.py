"""Rows with the columns of the question sets on the hub, for tests without the hub."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.task import TaskConfig
from qerl_lab.tasks.question_sets import DAPO_AFTER, DAPO_BEFORE

Row = dict[str, Any]


def gsm8k(n: int) -> Row:
    return {"question": f"What is {n} + 1?", "answer": f"{n}+1=<<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}


def bigmath(n: int) -> Row:
    return {
        "prompt": f"What is half of ${n}$?", "solution": f"\\frac{{{n}}}{{2}}", "source": "orca_math",
        "domain": ["Mathematics -> Algebra"], "llama8b_solve_rate": 0.5,
    }  # fmt: skip


def dapo(n: int) -> Row:
    content = f"{DAPO_BEFORE}What is ${n} + 1$?{DAPO_AFTER}"
    return {
        "data_source": "math_dapo", "prompt": [{"content": content, "role": "user"}], "ability": "MATH",
        "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"9a9b6eb4-{n:04d}"},
    }  # fmt: skip


def math500(n: int) -> Row:
    return {
        "problem": f"Find $x$ in $x^2 = {n}$, $x > 0$.", "solution": "...", "answer": f"\\sqrt{{{n}}}",
        "subject": "Algebra", "level": 3, "unique_id": f"test/algebra/{n}.json",
    }  # fmt: skip


def aime24(n: int) -> Row:
    return {
        "id": 60 + n, "problem": f"Find the remainder of {n}.", "solution": "...", "answer": f"{n:03d}",
        "url": "https://artofproblemsolving.com/wiki", "year": "2024",
    }  # fmt: skip


def aime25(n: int) -> Row:
    return {"problem": f"Find the sum of all bases {n}.", "answer": str(n), "id": str(n)}


def amc23(n: int) -> Row:
    return {"id": n, "answer": float(n), "url": "https://artofproblemsolving.com/wiki", "question": f"How far is {n}?"}


def write_jsonl(file: Path, rows: Sequence[Any]) -> Path:
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return file


def write_parquet(file: Path, rows: Sequence[Row]) -> Path:
    import pyarrow
    import pyarrow.parquet

    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file


# task -> function that makes a row, stem of its file, answer of row 7
SETS: dict[str, tuple[Callable[[int], Row], str, str]] = {
    "gsm8k": (gsm8k, "test", "8"),
    "bigmath": (bigmath, "train", "\\frac{7}{2}"),
    "dapo_math": (dapo, "train", "8"),
    "math500": (math500, "test", "\\sqrt{7}"),
    "aime24": (aime24, "train", "007"),
    "aime25": (aime25, "test", "7"),
    "amc23": (amc23, "test", "7"),
}


MANY = 200  # enough rows that one may be bad


def gsm8k_folder(folder: Path, bad: list[Any] = (), good: int = MANY) -> TaskConfig:
    """Write a folder of GSM8K with bad training rows after the good ones."""
    write_jsonl(folder / "train.jsonl", [*map(gsm8k, range(good)), *bad])
    write_jsonl(folder / "test.jsonl", [gsm8k(n) for n in range(1000, 1010)])
    return TaskConfig(name="gsm8k", path=str(folder))


def refusal(cfg: TaskConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        tasks.load(cfg)
    return str(caught.value)
