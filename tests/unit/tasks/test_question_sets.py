"""Question sets from files and from the hub: their questions, rows that are left out, and refusals."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

import hub_rows
from hub_rows import MANY, gsm8k_folder, refusal
from qerl_lab import tasks
from qerl_lab.config.message import say_hub_is_asked
from qerl_lab.config.option import ConfigError
from qerl_lab.config.task import BigMathConfig, ColumnsConfig, Gsm8kConfig, TaskConfig
from qerl_lab.tasks.question_sets import SOURCES

SHARED = Path(__file__).parents[3].parent / "shared" / "data"
TRAINED, JUDGED = ("gsm8k", "bigmath", "dapo_math"), ("math500", "aime24", "aime25", "amc23")


# --- every set


def test_every_set_has_rows_of_the_hub_and_a_role() -> None:
    """The tests below read these rows."""
    assert {*hub_rows.SETS} == {*TRAINED, *JUDGED} == {*SOURCES}, "add a row to SETS of tests/helpers/hub_rows.py"


@pytest.mark.parametrize("name", hub_rows.SETS)
def test_a_set_is_read_with_the_columns_of_the_hub(tmp_path: Path, name: str) -> None:
    make, stem, answer = hub_rows.SETS[name]
    hub_rows.write_parquet(tmp_path / f"{stem}.parquet", [make(n) for n in range(400)])
    cfg = TaskConfig(name=name, path=str(tmp_path))
    found = tasks.load(cfg, training=None).heldout
    if name in ("bigmath", "dapo_math"):
        found = [*found, *tasks.load(cfg).train]
    assert len({question.id for question in found}) == len(found) == 400
    assert [question.answer for question in found if re.search(r"\b7\b", question.prompt)] == [answer]
    assert all("Answer:" not in question.prompt for question in found), "the format that a set asks for is cut off"
    texts = [f"<think>x</think><answer>{question.answer}</answer>" for question in found[:8]]
    scores = tasks.load(cfg, training=None).grade(texts, found[:8])
    assert (scores["answer"].mean(), scores["format"].mean()) == (1, 1), "a gold answer is right"


def test_a_set_for_evaluation_is_refused_as_a_training_task() -> None:
    message = refusal(TaskConfig(name="amc23"))
    assert "task=amc23 is for evaluation only" in message
    assert "Type one to train on: task=arithmetic, bigmath, code_io, dapo_math, gsm8k; or python -m " in message
    assert message.endswith(" accuracy run=RUN_DIR benchmarks=amc23.")


@pytest.mark.parametrize("name", ["bigmath", "dapo_math"])
def test_a_set_without_a_test_split_holds_out_a_share_by_wording(tmp_path: Path, name: str) -> None:
    """The share does not depend on the order of rows, on blanks and case, nor on loading for an evaluation."""
    make, stem, _ = hub_rows.SETS[name]
    lines = [json.dumps(make(n)) for n in range(1000)]
    lines += [line.replace("What is", "WHAT  is").replace("$?", " $?\\n").replace("-0", "-9") for line in lines]
    (file := tmp_path / f"{stem}.jsonl").write_text("\n".join(lines))
    cfg = TaskConfig(name=name, path=str(file))
    task = tasks.load(cfg)
    train, heldout = ({question.answer for question in part} for part in (task.train, task.heldout))
    assert len(task.train) + len(task.heldout) == 2000
    assert 5 < len(heldout) < 60
    assert not train & heldout
    random.Random(0).shuffle(lines)
    file.write_text("\n".join(lines))
    assert {question.answer for question in tasks.load(cfg, training=None).heldout} == heldout


def test_the_same_questions_are_held_out_in_every_version(tmp_path: Path) -> None:
    """Otherwise a later version could evaluate on questions that an earlier run was trained on."""
    assert [n for n in range(60) if tasks.is_heldout(f"question {n}")] == [9, 18, 25, 26, 29, 35, 59]
    hub_rows.write_jsonl(tmp_path / "train.jsonl", [hub_rows.bigmath(n) for n in range(400)])
    found = tasks.load(TaskConfig(name="bigmath", path=str(tmp_path)), training=None).heldout
    assert [question.id for question in found] == [f"bigmath-train-{n}" for n in (49, 179, 207, 319)]


@pytest.mark.parametrize(("name", "kept"), [
    ("data/train.jsonl", True), ("main/train-00000-of-00001.parquet", True), ("train.parquet", True),
    ("train.json", False), ("other/train.jsonl", False),
])  # fmt: skip
def test_a_folder_may_have_the_layout_of_the_hub(tmp_path: Path, name: str, kept: bool) -> None:
    cfg, file = gsm8k_folder(tmp_path), tmp_path / name
    (tmp_path / "train.jsonl").unlink()
    file.parent.mkdir(exist_ok=True)
    (hub_rows.write_parquet if file.suffix == ".parquet" else hub_rows.write_jsonl)(file, [hub_rows.gsm8k(5)])
    if kept:
        assert [question.answer for question in tasks.load(cfg).train] == ["6"]
    else:
        message = refusal(cfg)
        assert f"task.path={tmp_path} has no train.jsonl, and no train.parquet. Put the rows there." in message


def test_the_parts_of_a_split_are_read_in_order(tmp_path: Path) -> None:
    cfg = gsm8k_folder(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    for part in (1, 0):
        hub_rows.write_parquet(tmp_path / f"train-0000{part}-of-00002.parquet", [hub_rows.gsm8k(part)])
    assert [question.answer for question in tasks.load(cfg).train] == ["1", "2"]


@pytest.mark.parametrize(("there", "said"), [
    (("0-of-00003", "2-of-00003"), "with the numbers 0, 2; allowed: each number below 3 once"),
    (("0-of-00002", "1-of-00002", "0-of-00001"), "with the numbers 0, 0, 1; allowed: each number below 1 once"),
    (("0-of-00001-a9b7", "0-of-00001-c3d4"), "with the numbers 0, 0; allowed: each number below 1 once"),
])  # fmt: skip
def test_parts_of_a_split_that_are_missing_or_of_two_copies_are_refused(
    tmp_path: Path, there: tuple[str, ...], said: str
) -> None:
    cfg = gsm8k_folder(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    for n, name in enumerate(there):
        hub_rows.write_parquet(tmp_path / f"train-0000{name}.parquet", [hub_rows.gsm8k(n)])
    assert f"{tmp_path} holds {len(there)} shards like train-00000-of-0000" in refusal(cfg)
    assert f"{said}. Download the split again." in refusal(cfg)


@pytest.mark.parametrize("name", ["bigmath", "dapo_math"])
@pytest.mark.parametrize("file", ["test.jsonl", "data/test-00000-of-00001.parquet"])
def test_a_test_file_of_your_own_is_held_out_and_all_training_rows_are_trained_on(
    tmp_path: Path, name: str, file: str
) -> None:
    make, stem, _ = hub_rows.SETS[name]
    hub_rows.write_parquet(tmp_path / f"{stem}.parquet", [make(n) for n in range(400)])
    (tmp_path / file).parent.mkdir(exist_ok=True)
    write = hub_rows.write_jsonl if file.endswith(".jsonl") else hub_rows.write_parquet
    write(tmp_path / file, [make(n) for n in range(400, 420)])
    cfg = TaskConfig(name=name, path=str(tmp_path))
    task = tasks.load(cfg)
    assert (len(task.train), len(task.heldout)) == (400, 20)
    assert tasks.load(cfg, training=None).heldout == task.heldout
    if name == "bigmath":  # ids of DAPO are in the rows
        assert [question.id for question in task.heldout[:2]] == ["bigmath-test-0", "bigmath-test-1"]


def test_rows_that_dapo_repeats_count_once_and_other_rows_of_one_id_are_bad(tmp_path: Path) -> None:
    rows = [hub_rows.dapo(n % 150) for n in range(1500)]
    hub_rows.write_parquet(tmp_path / "data" / "dapo-math-17k.parquet", rows)  # its name on the hub
    cfg = TaskConfig(name="dapo_math", path=str(tmp_path))
    task = tasks.load(cfg)
    assert len(task.train) + len(task.heldout) == 150
    assert task.warnings == ()
    hub_rows.write_jsonl(tmp_path / "train.jsonl", [*rows, hub_rows.dapo(3) | {"prompt": "Other?"}])
    (said,) = tasks.load(cfg).warnings
    assert "1 of 1,501 rows are bad and left out" in said
    assert "train.jsonl:1501 has the id '9a9b6eb4-0003' of a row before it" in said


def test_the_last_message_of_a_chat_is_the_question_of_dapo(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Half of 4?"}]
    file = hub_rows.write_jsonl(tmp_path / "train.jsonl", [hub_rows.dapo(1) | {"prompt": chat}])
    task = tasks.load(TaskConfig(name="dapo_math", path=str(file)))
    assert [question.prompt for question in (*task.train, *task.heldout)] == ["Half of 4?"]


@pytest.mark.parametrize(("levels", "count"), [("3-5", 300), ("4-5", 200), ("all", 500)])
def test_bigmath_takes_the_requested_levels(tmp_path: Path, levels: str, count: int) -> None:
    rows = [hub_rows.bigmath(n) | {"level": (n % 5 + 1, f"Level {n % 5 + 1}", n % 5 + 1.0)[n % 3]} for n in range(500)]
    hub_rows.write_jsonl(tmp_path / "train.jsonl", rows)
    cfg = TaskConfig(name="bigmath", path=str(tmp_path), bigmath=BigMathConfig(levels))
    task = tasks.load(cfg)
    assert (len(task.train) + len(task.heldout), task.warnings) == (count, ())


def test_bigmath_notes_rows_without_a_level_and_leaves_out_a_wrong_level(tmp_path: Path) -> None:
    rows = [hub_rows.bigmath(n) for n in range(MANY)]
    cfg = TaskConfig(name="bigmath", path=str(tmp_path))
    hub_rows.write_jsonl(tmp_path / "train.jsonl", rows)
    assert [said for said in tasks.load(cfg).warnings if "200 rows have no level" in said]
    hub_rows.write_jsonl(
        tmp_path / "train.jsonl", [*({**row, "level": 4} for row in rows), rows[0] | {"level": "hard"}]
    )
    (said,) = tasks.load(cfg).warnings
    assert "train.jsonl:201 has the level 'hard'; levels are 1 to 5" in said


def steps_folder(folder: Path, train: list[int], test: list[int]) -> TaskConfig:
    """Write GSM8K with solutions of these numbers of steps, a blank line after each step; 0 stands for no solution."""
    for name, steps in (("train", train), ("test", test)):
        rows = [
            {"question": f"{name} {n}: {count} steps?", "answer": "It is 1.\n \n" * count + "#### 1"}
            for n, count in enumerate(steps)
        ]
        hub_rows.write_jsonl(folder / f"{name}.jsonl", rows)
    return TaskConfig(name="gsm8k", path=str(folder))


@pytest.mark.parametrize(("most", "train", "test"), [(None, 4, 3), (4, 4, 3), (3, 3, 2), (2, 1, 1)])
def test_max_steps_of_gsm8k_limits_training_held_out_and_worked_questions(
    tmp_path: Path, most: int | None, train: int, test: int
) -> None:
    cfg = replace(steps_folder(tmp_path, [3, 2, 4, 3], [4, 2, 3]), gsm8k=Gsm8kConfig(most))
    for task in (tasks.load(cfg), tasks.load(cfg, training="worked")):
        assert (len(task.train), len(task.heldout), task.warnings) == (train, test, ())
        assert (task.data["training_questions"], task.data["heldout_questions"]) == (train, test)
        assert all(int(question.prompt.split()[2]) <= (most or 4) for question in task.train + task.heldout)
    assert tasks.load(cfg).train[-1].id == f"gsm8k-train-{1 if most == 2 else 3}", "a question keeps its id"


@pytest.mark.parametrize(("train", "test", "said"), [
    ([4, 3, 5], [2], "leaves out all 3 questions; the shortest solution has 3 steps. Type task.gsm8k.max_steps=3."),
    ([2], [5, 4], "leaves out all 2 questions; the shortest solution has 4 steps."),
])  # fmt: skip
def test_max_steps_that_leaves_no_question_is_refused(
    tmp_path: Path, train: list[int], test: list[int], said: str
) -> None:
    cfg = replace(steps_folder(tmp_path, train, test), gsm8k=Gsm8kConfig(2))
    assert f"task.gsm8k.max_steps=2 {said}" in refusal(cfg)


def test_rows_of_gsm8k_without_a_solution_are_bad_with_max_steps(tmp_path: Path) -> None:
    cfg = steps_folder(tmp_path, [0, *[2] * 199], [2])
    assert (len(tasks.load(cfg).train), tasks.load(cfg).warnings) == (200, ())
    task = tasks.load(replace(cfg, gsm8k=Gsm8kConfig(2)))
    assert len(task.train) == 199
    assert "train.jsonl:1 has no solution, and task.gsm8k.max_steps=2 counts its steps" in task.warnings[0]


# --- keys


def test_columns_may_have_other_names_and_be_nested(tmp_path: Path) -> None:
    rows = [{"meta": {"q": f"Q {n}", "key": n}, "gold": f"#### {n}"} for n in range(20)]
    hub_rows.write_jsonl(tmp_path / "train.jsonl", rows[:10])
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows[10:])
    columns = ColumnsConfig(question="meta.q", answer="gold", id="meta.key")
    task = tasks.load(TaskConfig(name="gsm8k", path=str(tmp_path), columns=columns))
    assert [(question.id, question.prompt, question.answer) for question in task.train[:2]] == [
        ("gsm8k-0", "Q 0", "0"), ("gsm8k-1", "Q 1", "1"),
    ]  # fmt: skip


def test_an_empty_id_numbers_the_rows(tmp_path: Path) -> None:
    row = {"problem": "Half of one?", "answer": "1/2"}
    cfg = TaskConfig(name="math500", path=str(hub_rows.write_jsonl(tmp_path / "a.jsonl", [row])))
    with pytest.raises(ConfigError, match=re.escape("task.columns.id=NAME (empty numbers the rows)")):
        tasks.load(cfg, training=None)
    assert tasks.load(replace(cfg, columns=ColumnsConfig(id="")), training=None).heldout[0].id == "math500-test-0"


def test_one_file_suffices_for_an_evaluation_and_not_for_a_training_on_two_splits(tmp_path: Path) -> None:
    gsm8k_folder(tmp_path)
    cfg = TaskConfig(name="gsm8k", path=str(tmp_path / "test.jsonl"))
    assert len(tasks.load(cfg, training=None).heldout) == 10
    assert "is one file; allowed: FILE.jsonl or FILE.parquet of a set without a test split" in refusal(cfg)


@pytest.mark.parametrize(("name", "said"), [
    ("rows.csv", "is one file; allowed: FILE.jsonl or FILE.parquet"), ("none.jsonl", "is not there"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "rows.csv").touch()
    message = refusal(TaskConfig(name="bigmath", path=str(tmp_path / name)))
    assert f"task.path={tmp_path / name} {said}" in message


# --- the hub


@pytest.mark.parametrize("error", [
    ConnectionError("Couldn't reach the hub\nmore"), ValueError("unknown split"), RuntimeError(""),
], ids=repr)  # fmt: skip
def test_an_unreachable_hub_is_a_message_and_not_a_crash(monkeypatch, capsys, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("datasets.get_dataset_config_names", fail)
    say_hub_is_asked.cache_clear()  # the note is printed once per process
    message = refusal(TaskConfig(name="gsm8k", path="someone/no-such-set"))
    why = "the hub cannot be reached" if isinstance(error, ConnectionError) else type(error).__name__
    assert (
        f"'someone/no-such-set' is no local file or directory, and could not be loaded from the hub ({why}" in message
    )
    assert "Type task.path=DIRECTORY with train.jsonl and test.jsonl, or with both as .parquet." in message
    assert "questions of someone/no-such-set: asking the Hugging Face hub" in capsys.readouterr().err
    assert "\n" not in message


def test_the_hub_is_asked_for_the_right_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fail(*args: object, **keywords: object) -> None:
        asked.append((*args, keywords["split"]))
        raise OSError("offline")

    monkeypatch.setattr("datasets.load_dataset", fail)
    for name in TRAINED:
        with pytest.raises(ConfigError):
            tasks.load(TaskConfig(name=name))
    with pytest.raises(ConfigError):
        tasks.load(TaskConfig(name="bigmath", bigmath=BigMathConfig("4-5")))
    for name in ("gsm8k", *JUDGED):
        with pytest.raises(ConfigError):
            tasks.load(TaskConfig(name=name), training=None)
    assert asked == [
        ("openai/gsm8k", "main", "train"),
        ("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "train"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", "default", "train"),
        ("open-r1/Big-Math-RL-Verified-Processed", "level_4_5", "train"),
        ("openai/gsm8k", "main", "test"),
        ("HuggingFaceH4/MATH-500", "default", "test"),
        ("HuggingFaceH4/aime_2024", "default", "train"),
        ("math-ai/aime25", "default", "test"),
        ("math-ai/amc23", "default", "test"),
    ]


@pytest.mark.parametrize(("has", "asked"), [(["main", "socratic"], "main"), (["default"], None)])
def test_another_set_on_the_hub_is_read_in_the_usual_configuration_if_it_has_it(
    monkeypatch: pytest.MonkeyPatch, has: list[str], asked: str | None
) -> None:
    import datasets

    found = []
    rows = datasets.Dataset.from_list([hub_rows.gsm8k(n) for n in range(3)])
    monkeypatch.setattr("datasets.get_dataset_config_names", lambda path: has)
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **_: found.append(args) or rows)
    assert len(tasks.load(TaskConfig(name="gsm8k", path="me/mine"), training=None).heldout) == 3
    assert found == [("me/mine", asked)]


def test_rows_from_the_hub_equal_rows_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = [hub_rows.aime24(n) for n in range(30)]
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    file = hub_rows.write_jsonl(tmp_path / "rows.jsonl", rows)
    loaded = tasks.load(TaskConfig(name="aime24"), training=None)
    assert loaded.heldout == tasks.load(TaskConfig(name="aime24", path=str(file)), training=None).heldout
    assert loaded.heldout[3].id == "aime24-63"


# --- worked solutions


@pytest.fixture
def gsm8k_solved(tmp_path: Path) -> TaskConfig:
    answers = [
        "She sold 48/2 = <<48/2=24>>24 clips.\nThat is 1,000 = <<1000>>1,000 in all.\n#### 1,000",
        "It is $<<2*3=6>>6.\n#### 6",
    ]
    rows = [{"question": f"Question {n}?", "answer": answer} for n, answer in enumerate(answers * 100)]
    rows.append({"question": "A bad one?", "answer": "1 < 2, so <<a 3\n#### 3"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text(json.dumps({"question": "Question 1?", "answer": "#### 6"}) + "\n")
    return TaskConfig(name="gsm8k", path=str(tmp_path))


def test_calculator_marks_of_gsm8k_are_removed_from_solutions(gsm8k_solved: TaskConfig) -> None:
    found = tasks.load(gsm8k_solved, training="worked")
    assert found.train[0].payload["solution"] == (
        "<think>She sold 48/2 = 24 clips.\nThat is 1,000 = 1,000 in all.</think><answer>1000</answer>"
    )
    assert not {"A bad one?", "Question 1?"} & {question.prompt for question in found.train}, "the last is held out"
    assert "1 of 201 rows are bad and left out" in found.warnings[0]


def test_every_solution_earns_the_full_reward_and_questions_stay_the_same(gsm8k_solved: TaskConfig) -> None:
    found, usual = tasks.load(gsm8k_solved, training="worked"), tasks.load(gsm8k_solved)
    scores = found.grade([question.payload["solution"] for question in found.train], found.train)
    assert (scores["format"].min(), scores["answer"].min()) == (1, 1)
    kept = {(question.id, question.prompt, question.answer) for question in found.train}
    assert kept <= {(question.id, question.prompt, question.answer) for question in usual.train}
    assert len(usual.train) - len(kept) == 1  # the bad one


# --- the record, and real data


def test_the_recorded_hash_changes_with_the_data(tmp_path: Path) -> None:
    before = tasks.load(gsm8k_folder(tmp_path)).data
    assert before == tasks.load(gsm8k_folder(tmp_path)).data
    assert (before["training_questions"], before["heldout_questions"]) == (MANY, 10)
    text = (tmp_path / "train.jsonl").read_text().replace("What is 7 + 1", "What is 1 + 7")
    (tmp_path / "train.jsonl").write_text(text)
    after = tasks.load(TaskConfig(name="gsm8k", path=str(tmp_path))).data
    assert {key for key in before if before[key] != after[key]} == {"training_sha256"}
    solved = steps_folder(tmp_path, [2], [3])
    usual, worked = (tasks.load(solved, training=kind).data["training_sha256"] for kind in ("train", "worked"))
    assert usual != worked, "solutions, or tests of a program, are data too"
    json.dumps(after)


@pytest.mark.skipif(not (SHARED / "gsm8k").is_dir(), reason="no copy of GSM8K beside the repository")
def test_all_of_gsm8k_is_read_and_its_gold_answers_are_right() -> None:
    task = tasks.load(TaskConfig(name="gsm8k", path=str(SHARED / "gsm8k")))
    assert (len(task.train), len(task.heldout), task.warnings) == (7473, 1319, ())
    questions = task.train + task.heldout
    scores = task.grade([f"<think>x</think><answer>{question.answer}</answer>" for question in questions], questions)
    assert {part: values.mean() for part, values in scores.items()} == {"format": 1, "answer": 1, "unparsed": 0}
