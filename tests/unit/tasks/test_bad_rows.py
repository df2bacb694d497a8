"""Bad rows are left out, counted and named. Too many of them are an error."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hub_rows
from hub_rows import MANY, gsm8k_folder, refusal
from qerl_lab import tasks
from qerl_lab.config.task import BigMathConfig, TaskConfig
from qerl_lab.tasks.question_files import Row


@pytest.mark.parametrize(("row", "said"), [
    ({"question": "Two?"}, "has no 'answer'; it has ['question']"),
    ({"question": "Two?", "answer": 2}, "has no text in 'answer', but int"),
    ({"question": None, "answer": "#### 2"}, "has no 'question'; it has ['answer']"),
    ({"question": " ", "answer": "#### 2"}, "has nothing in 'question'"),
    *(({"question": "Two?", "answer": answer}, "has no number after `####` (write for example `#### 72`): ")
      for answer in ("4", "#### four")),
    ([1, 2], "is JSON but no object"),
])  # fmt: skip
def test_a_bad_row_is_left_out_counted_and_named(tmp_path: Path, row: Any, said: str) -> None:
    cfg = gsm8k_folder(tmp_path, [row])
    task = tasks.load(cfg)
    assert (len(task.train), task.data["training_rows_left_out"], task.data["heldout_rows_left_out"]) == (MANY, 1, 0)
    (warning,) = task.warnings
    assert f"1 of 201 rows are bad and left out; the first: {tmp_path / 'train.jsonl'}:201 {said}" in warning


@pytest.mark.parametrize(("line", "said"), [
    (b'{"question": "cut', "is not JSON (Invalid control character at: character 18)"),
    (b'{"question": "Two?"', "is not JSON (Expecting ',' delimiter: character 21)"),
    (b'{"question": "\xff\xfe", "answer": "#### 1"}', "is not JSON ('utf-8' codec can't decode byte"),
    (b'{"question": "\\ud800", "answer": "#### 1"}', "has half a character (a lone surrogate) in 'question'"),
])  # fmt: skip
def test_a_line_that_is_no_row_is_left_out_counted_and_named(tmp_path: Path, line: bytes, said: str) -> None:
    cfg = gsm8k_folder(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_bytes(line + b"\n\n" + file.read_bytes() + b"\n")
    task = tasks.load(cfg)
    assert len(task.train) == MANY, "blank lines are no rows"
    assert f"train.jsonl:1 {said}" in task.warnings[0]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, is_damaged: bool) -> None:
    cfg = gsm8k_folder(tmp_path)
    (tmp_path / "train.jsonl").rename(file := tmp_path / "train.parquet")  # lines of JSON
    if is_damaged:
        hub_rows.write_parquet(file, [hub_rows.gsm8k(n) for n in range(5000)])
        content = bytearray(file.read_bytes())
        content[100 : len(content) // 2] = b"\xff" * (len(content) // 2 - 100)
        file.write_bytes(content)
    assert f"{file} cannot be read as {file.suffix} (" in refusal(cfg)


def test_a_byte_order_mark_at_the_start_costs_no_row(tmp_path: Path) -> None:
    cfg = gsm8k_folder(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    task = tasks.load(cfg)
    assert (len(task.train), task.warnings) == (MANY, ())


def test_more_than_one_bad_row_in_a_hundred_is_an_error(tmp_path: Path) -> None:
    assert len(tasks.load(gsm8k_folder(tmp_path, [{"question": "Two?"}] * 2, good=198)).train) == 198
    message = refusal(gsm8k_folder(tmp_path, [{"question": "Two?"}] * 3, good=197))
    assert "3 of 200 rows are bad and left out; the first: " in message
    assert "train.jsonl:198 has no 'answer'" in message
    assert "more than 1% is an error. Check task.path (a line of .jsonl must be one JSON object), or say" in message


@pytest.mark.parametrize(("name", "change", "said"), [
    ("math500", {"answer": True}, "has no text in 'answer', but bool"),
    ("math500", {"answer": ""}, "has nothing in 'answer'"),
    ("math500", {"answer": float("nan")}, "has no number in 'answer': 'nan'"),
    ("math500", {"answer": 0.1 + 0.2}, "has in 'answer' the computed number 0.30000000000000004, which no"),
    ("math500", {"answer": 1 / 3}, "has in 'answer' the computed number 0.3333333333333333, which no"),
    ("math500", {"unique_id": None}, "has no 'unique_id'"),
    ("math500", {"unique_id": "test/algebra/7.json"}, "has the id 'test/algebra/7.json' of a row before it"),
    ("amc23", {"answer": float("nan")}, "has no number in 'answer': 'nan'"),
    ("aime24", {"answer": "x"}, "has no number in 'answer': 'x'"),
    ("dapo_math", {"reward_model": "34"}, "has no 'reward_model.ground_truth'"),
    ("dapo_math", {"prompt": [{"role": "assistant", "content": "?"}]}, "has no message of a user"),
    ("bigmath", {"solution": None}, "has no 'solution'"),
])  # fmt: skip
def test_a_bad_row_of_each_set_is_named(tmp_path: Path, name: str, change: dict[str, Any], said: str) -> None:
    make, stem, _ = hub_rows.SETS[name]
    rows = [*map(make, range(MANY)), make(MANY) | change]
    hub_rows.write_jsonl(tmp_path / f"{stem}.jsonl", rows)
    task = tasks.load(TaskConfig(name=name, path=str(tmp_path), bigmath=BigMathConfig("all")), training=None)
    (warning,) = task.warnings
    assert f"{stem}.jsonl:201 {said}" in warning
    assert task.data["heldout_rows_left_out"] == 1


def test_a_training_question_that_is_also_held_out_is_left_out_in_any_spelling(tmp_path: Path) -> None:
    row = hub_rows.gsm8k(1003)
    cfg = gsm8k_folder(tmp_path, [row | {"question": row["question"].upper().replace(" ", "  ")}])
    task = tasks.load(cfg)
    assert len(task.train) == MANY
    assert "1 of 201 rows are bad and left out; the first: gsm8k-train-200 is held out too" in task.warnings[0]
    *lines, heldout = (tmp_path / "train.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_bytes(b"".join([heldout, *lines]))
    first = tasks.load(replace(cfg, train_questions=5)).train
    assert [question.prompt for question in first] == [question.prompt for question in task.train[:5]], "five are left"
    cfg = gsm8k_folder(tmp_path, [hub_rows.gsm8k(n) for n in range(1000, 1010)])
    assert "10 of 210 rows are bad" in refusal(cfg)


@pytest.mark.parametrize(("number", "text"), [(27.0, "27"), (0.1, "0.1"), (-12.375, "-12.375"), (1e-7, "1e-07")])
def test_a_number_becomes_an_answer_with_the_digits_of_the_file(number: float, text: str) -> None:
    assert Row({"answer": number}, {"answer": "answer"}).number_or_text("answer") == text


def test_held_out_questions_that_repeat_another_are_counted(tmp_path: Path) -> None:
    cfg = gsm8k_folder(tmp_path)
    assert tasks.load(cfg).warnings == ()
    first = hub_rows.gsm8k(1000)
    again = [first, first | {"question": first["question"].upper()}]
    hub_rows.write_jsonl(tmp_path / "test.jsonl", [*again, hub_rows.gsm8k(1001)])
    (warning,) = tasks.load(cfg).warnings
    assert warning == "heldout questions: 1 of 3 repeat another, and intervals count each as a new one"


def test_a_file_that_holds_out_its_training_questions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "from qerl_lab.tasks import Question\n"
        "def train(cfg): return [Question('1', '1+1?', '2'), Question('2', '1+2?', '3')]\n"
        "heldout = train\n"
    )
    assert f"1 is held out too, and more than 1% is an error. Check train and heldout in {file}." in refusal(
        TaskConfig(module=str(file))
    )
