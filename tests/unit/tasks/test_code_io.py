"""The task of programs: its rows, and the rewards of programs."""

from pathlib import Path
from typing import Any

import pytest

import hub_rows
from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.task import CodeIoConfig, TaskConfig
from qerl_lab.tasks import Question, code_io


def answer(program: str) -> str:
    return f"<think>so</think>\n<answer>{program}</answer>"


def problem(k: int) -> dict[str, Any]:
    tests = [{"input": f"{n}\n", "output": f"{n * k}\n"} for n in (2, 3)]
    return {"question": f"Print n times {k}.", "tests": tests}


def graded(texts: list[str], question: Question) -> list[tuple[float, float]]:
    """Return for each completion whether every test passed, and the share of tests that did."""
    scores = code_io.grade(texts, [question] * len(texts))
    return list(zip(scores["answer"].tolist(), scores["tests"].tolist(), strict=True))


def question_of(*tests: tuple[str, str], seconds: int = 10) -> Question:
    """Return a question with these tests. Only endless programs need few `seconds`; a busy machine needs many."""
    payload = {"inputs": [i for i, _ in tests], "outputs": [o for _, o in tests], "seconds": seconds, "memory_mib": 256}
    return Question("q", "?", "", payload)


# --- rewards of programs


EARNED = {
    "print(int(input()) * 2)": (1.0, 1.0), "print(4)": (0.0, 0.5), "print(0)": (0.0, 0.0), "1/0": (0.0, 0.0),
    "print(int(input()) * 2); 1/0": (0.0, 0.0), "print(int(input()) * 2, end='   \\n\\n')": (1.0, 1.0),
    "print(' ', int(input()) * 2)": (0.0, 0.0), "```py\nfence = '```'\nprint(int(input()) * 2)\n```": (1.0, 1.0),
    "print('```', end='') if 0 else print(int(input()) * 2)": (1.0, 1.0),
    "n = int(input())\nwhile n > 3: pass\nprint(n * 2)": (0.0, 0.5),
    "if 1 < 2: print(int(input()) * 2)": (1.0, 1.0), "x = '</think>'\nprint(int(input()) * 2)": (0.0, 0.0),
}  # fmt: skip
HOSTILE = [
    "print(4)", "<think><answer>print(4)</answer></think>", answer("#" * 30_000 + "\nprint(4)"), answer("\0"),
    answer("\ud800"), answer("```\nprint(4)"),
]  # fmt: skip


def test_a_completion_earns_the_share_of_tests_and_all_of_them() -> None:
    question = question_of(("2\n", "4"), ("5\n", "10"), seconds=1)
    found = graded([*map(answer, EARNED), *HOSTILE], question)
    assert dict(zip(EARNED, found, strict=False)) == EARNED
    assert found[len(EARNED) :] == [(0.0, 0.0)] * len(HOSTILE)


@pytest.mark.parametrize("text", [
    "```text\n5\n```\n{python}", "{python}\nIt prints:\n```\n10\n```", "{python}\nIt prints:\n```text\n10\n```",
    "```cpp\nint main();\n```\n{unmarked}\n```bash\npython double.py\n```", "```text\n5\n{python}",
    "{python} It doubles.\n", "```python\nprint(0)\n``` No.\n{python}", "```python\nprint(0)\n```\n{python}",
    "```python title=double.py\n{program}\n```", "```py3\n{program}```", "```python3.11\n{program}\n```",
    "```Python \n{program}\n```\n```text\n5\n```", "Here:\n```\n{program}```",
    "```python\r\n{program}\r\n```\r\nIt doubles.",
])  # fmt: skip
def test_the_program_is_the_last_python_block_of_an_answer(text: str) -> None:
    program = "print(int(input()) * 2)"
    blocks = {"python": f"```python\n{program}\n```", "unmarked": f"```\n{program}\n```"}
    found = code_io.extract_program(answer(text.format(program=program, **blocks)))
    assert (found or "").strip() == program


def test_the_parts_of_the_reward_are_weighted(tmp_path: Path) -> None:
    path = str(hub_rows.write_jsonl(tmp_path / "rows.jsonl", [problem(n) for n in range(100)]))
    task = tasks.load(TaskConfig(name="code_io", path=path, answer_reward=2.0, code_io=CodeIoConfig(tests_reward=0.25)))
    texts = [answer("print(int(input()) * 2)"), answer("print(4)"), "print(4)"]
    questions = [question_of(("2\n", "4"), ("5\n", "10"))] * 3
    rewards = task.weighted(task.grade(texts, questions), texts)
    assert {part: values.tolist() for part, values in rewards.items() if part != "format"} == {
        "answer": [2.0, 0.0, 0.0], "tests": [0.25, 0.125, 0.0],
    }  # fmt: skip
    assert rewards["format"].tolist() == [0.2, 0.2, 0.0]


def test_equal_programs_for_one_question_are_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("qerl_lab.tasks.code_sandbox.run", lambda programs: asked.append(programs) or [["4"]] * 2)
    question = question_of(("2\n", "4"))
    scores = code_io.grade([answer("print(4)"), answer("print(5)"), answer("print(4)"), ""], [question] * 4)
    assert len(asked[0]) == 2
    assert scores["tests"].tolist() == [1.0, 1.0, 1.0, 0.0]


# --- rows


def test_rows_are_read_from_a_folder_or_from_one_file(tmp_path: Path) -> None:
    rows = [problem(k) for k in range(300)]
    hub_rows.write_parquet(tmp_path / "train.parquet", rows[:200])
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows[200:])
    cfg = TaskConfig(name="code_io", path=str(tmp_path), code_io=CodeIoConfig(seconds=3, memory_mib=128))
    task = tasks.load(cfg)
    assert (len(task.train), len(task.heldout)) == (200, 100)
    assert (task.train[7].payload["seconds"], task.train[7].payload["memory_mib"]) == (3, 128)
    assert graded([answer("print(int(input()) * 7)")], task.train[7]) == [(1.0, 1.0)]
    one_file = tasks.load(TaskConfig(name="code_io", path=str(hub_rows.write_jsonl(tmp_path / "all.jsonl", rows))))
    assert len(one_file.train) + len(one_file.heldout) == 300
    assert 0 < len(one_file.heldout) < 20


@pytest.mark.parametrize(("tests", "said"), [
    ([], "has no list of tests in 'tests'"), ("[]", "has no list of tests in 'tests'"), (None, "has no 'tests'"),
    *(([test], "has a test without an input and an output of text in 'tests'")
      for test in (1, {"input": "1"}, {"input": "1", "output": "\n"})),
])  # fmt: skip
def test_a_row_with_bad_tests_is_named(tmp_path: Path, tests: object, said: str) -> None:
    good = {"question": "Q", "tests": [{"input": "", "output": "1"}]}
    rows = [good | {"question": f"Q{n}"} for n in range(200)] + [{"question": "bad", "tests": tests}]
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows)
    task = tasks.load(TaskConfig(name="code_io", path=str(tmp_path)), training=None)
    assert f"test.jsonl:201 {said}" in task.warnings[0]
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows[200:])
    with pytest.raises(ConfigError, match=r"columns to read: task\.columns\.question=NAME task\.columns\.tests=NAME\."):
        tasks.load(TaskConfig(name="code_io", path=str(tmp_path)), training=None)


def test_a_missing_path_is_refused_with_the_words_to_type() -> None:
    with pytest.raises(ConfigError, match=r"which is not set\. Type task\.path=DIRECTORY with train\.jsonl and"):
        tasks.load(TaskConfig(name="code_io"))


def test_a_machine_without_a_sandbox_refuses_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigError("cannot confine them")

    monkeypatch.setattr("qerl_lab.tasks.code_sandbox.check", fail)
    with pytest.raises(ConfigError, match="cannot confine them"):
        tasks.load(TaskConfig(name="code_io", path="rows.jsonl"))
