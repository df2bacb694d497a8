"""A task or a reward in a Python file of the user: the contract, refusals, and the examples of docs/tasks.md."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

import hub_rows
from qerl_lab import tasks
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import config_hash, settings_of_run
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import module_hash, with_absolute_paths
from qerl_lab.config.schema import RunConfig, TaskConfig
from qerl_lab.tasks import Question
from qerl_lab.tasks.module_file import GraderFailed

DOCS = Path(__file__).parents[3] / "docs" / "tasks.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
REWARD = """
import numpy as np
def grade(texts, questions):
    right = np.array([question.answer in text for text, question in zip(texts, questions)], float)
    return {"format": right, "answer": right}
"""
ONE = "from qerl_lab.tasks import Question\n"


def file(folder: Path, text: str, name: str = "mine.py") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def load(folder: Path, text: str, **keys: object) -> tasks.Task:
    return tasks.load(TaskConfig(module=file(folder, text), train_questions=50, **keys))


# --- the examples


def test_the_first_example_loads_as_a_task(tmp_path: Path) -> None:
    task = tasks.load(TaskConfig(module=file(tmp_path, EXAMPLES[0], "pens.py")))
    assert task.name == "pens"
    assert (len(task.train), len(task.heldout), task.warnings) == (1110, 186, ())
    question = task.train[0]
    texts = [f"<think>x</think><answer>{question.answer}</answer>", f"{'x' * 90}<answer>{question.answer}</answer>"]
    rewards = task.weighted(task.grade(texts, [question] * 2), texts)
    assert sum(rewards.values()).tolist() == pytest.approx([0.2 + 1 + 0.1, 1])


def test_the_second_example_reads_rows(tmp_path: Path) -> None:
    rows = [{"riddle": f"R\u2028{n}?", "solution": n if n % 2 else f"{n}"} for n in range(300)]
    rows += [{"riddle": "Rätsel?", "solution": "1", "language": "de"}, {"riddle": "Long?", "solution": "x" * 51}]
    path = str(hub_rows.write_jsonl(tmp_path / "rows.jsonl", rows))
    task = tasks.load(TaskConfig(name="gsm8k", module=file(tmp_path, EXAMPLES[1], "riddles.py"), path=path))
    assert {question.id for question in task.train + task.heldout} == {f"riddles-train-{n}" for n in range(300)}
    assert task.heldout
    assert {question.answer for question in task.train + task.heldout} == {f"{n}" for n in range(300)}
    (said,) = task.warnings
    assert "1 of 302 rows are bad and left out; the first: " in said
    assert "rows.jsonl:302 has a long answer" in said


def test_a_changed_copy_of_the_file_reads_the_same_questions(tmp_path: Path) -> None:
    """Ids and SHA-256 of the questions are equal, so a report pairs runs with either file by question."""
    path = str(hub_rows.write_jsonl(tmp_path / "rows.jsonl", [{"riddle": f"R{n}?", "solution": n} for n in range(300)]))
    files = [file(tmp_path, EXAMPLES[1], "riddles.py"), file(tmp_path, f"{EXAMPLES[1]}\n# copied\n", "other.py")]
    first, second = (tasks.load(TaskConfig(module=module, path=path)) for module in files)
    assert (first.train, first.heldout, first.data) == (second.train, second.heldout, second.data)


@pytest.mark.parametrize(("there", "typed"), [("train", "held_out"), ("heldout", "trian")])
def test_a_file_with_only_training_or_held_out_questions_gets_a_note(tmp_path: Path, there: str, typed: str) -> None:
    """Otherwise a misspelled name would silently train on one set and evaluate on another."""
    text = ONE + "".join(f"def {n}(cfg): return [Question('{n}', '{n}?', '1')]\n" for n in (there, typed))
    (said,) = load(tmp_path, text).warnings
    other = {"train": "heldout: the held-out", "heldout": "train: the training"}[there]
    assert f"mine.py defines {there} but not {other} questions are those of task=arithmetic" in said


def test_a_file_with_a_reward_alone_keeps_the_questions_of_the_task(tmp_path: Path) -> None:
    """Ids and SHA-256 of the questions are equal, so a report pairs runs with and without the file by question."""
    path = str(hub_rows.write_jsonl(tmp_path / "rows.jsonl", [{"problem": "2?", "answer": "2", "unique_id": "two"}]))
    plain = tasks.load(TaskConfig(name="math500", path=path), training=None)
    mine = tasks.load(TaskConfig(name="math500", path=path, module=file(tmp_path, REWARD)), training=None)
    assert [question.id for question in mine.heldout] == ["math500-two"]
    assert mine.data == plain.data


@pytest.mark.integration
def test_a_run_trains_on_the_first_example(tmp_path: Path, tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part of the reward that the file adds is a metric of the run."""
    from qerl_lab.record.directory import RunDirectory
    from qerl_lab.record.environment import TypedCommand
    from qerl_lab.train.run import run
    from qerl_lab.train.stop import Stop

    cfg = with_absolute_paths(
        tiny(task__module=file(tmp_path, EXAMPLES[0]), steps=1, eval__questions=0, run_dir=str(tmp_path / "run"))
    )
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.claim(cfg, TypedCommand("python -m qerl_lab"))
    assert run(cfg, directory, Stop()) == 0
    (step,) = [line["metrics"] for line in directory.metrics() if "reward/mean" in line["metrics"]]
    assert 0 <= step["reward/short"] <= 0.1
    assert directory.config().task.module_hash == module_hash(str(tmp_path / "mine.py"))


# --- the contract


def test_a_file_may_add_training_questions_to_a_set_for_evaluation(tmp_path: Path) -> None:
    hub_rows.write_jsonl(tmp_path / "test.jsonl", [hub_rows.amc23(n) for n in range(5)])
    text = ONE + "def train(cfg): return [Question('a', 'A?', '1')]"
    assert [question.id for question in load(tmp_path, text, name="amc23", path=str(tmp_path)).train] == ["a"]


def test_a_file_may_define_dataclasses_and_pickle_them(tmp_path: Path) -> None:
    text = f"""from __future__ import annotations
import pickle
from dataclasses import dataclass
{ONE}
@dataclass
class Riddle:
    text: str

def train(cfg): return [Question("a", pickle.loads(pickle.dumps(Riddle("A?"))).text, "1")]
"""
    assert load(tmp_path, text).train == [Question("a", "A?", "1")]


@pytest.mark.parametrize(("text", "said"), [
    ("x = 1", "defines none of train, heldout, grade, weights, worked. docs/tasks.md shows one."),
    ("def train(", "cannot be imported: SyntaxError: "),
    ("1/0", "cannot be imported: ZeroDivisionError: division by zero"),
    ("def train(cfg): return 3", "train(cfg) must return a list of qerl_lab.tasks.Question."),
    (ONE + "def train(cfg): return [Question('a', 'A?', '1'), Question('a', 'B?', '1')]",
     "two questions with the id 'a'. Give"),
    ("raise SystemExit(3)", "cannot be imported: SystemExit: 3"),
    (ONE + "def train(cfg): return [Question(['a'], 'A?', '1')]", "returned the question ['a']; its id, prompt and"),
    (ONE + "def train(cfg): return [Question('a', 7, '1')]",
     "train(cfg) returned the question 'a'; its id, prompt and answer must be text, and its payload what JSON holds:"),
    (ONE + "def train(cfg): return [Question('a', 'A?', 4)]", "question 'a'; its id, prompt and answer must be text"),
    (ONE + "def heldout(cfg): return [Question('a', 'A?', '1', {'seen': {1}})]",
     "must be text, and its payload what JSON holds: Object of type set is not JSON serializable."),
    (REWARD + "def weights(cfg): return None",
     "weights(cfg) must return a dict of a number for each part, and returned None."),
    (REWARD + "def weights(cfg): return {'short': float('inf')}", "for each part, and returned {'short': inf}."),
    *[(REWARD + f"def weights(cfg): return {{'{part}': 1.0}}", f"weighs {part}, the name of another part, of another ")
      for part in ("format", "mean", "<part>", "id", "tokens", "engine")],
    ("def weights(cfg): return {'short': 1.0}", "defines weights without grade. Define grade too."),
    ("def train(cfg): return open('no/file')", "train(cfg) raised FileNotFoundError: [Errno 2] No such file or direct"),
    ("def train(cfg): exit(0)", "train(cfg) raised SystemExit: 0 (line 1)."),
    (REWARD + "\ndef weights(cfg):\n    raise ValueError('odd')", "weights(cfg) raised ValueError: odd (line "),
])  # fmt: skip
def test_a_file_that_breaks_the_contract_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert f"task.module={tmp_path / 'mine.py'}" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(("returned", "said"), [
    ("3", "must return a dict of scores with the keys format, answer and those of weights(cfg), here none; and"),
    ("{'answer': [1.0]}", "answer and those of weights(cfg), here none; and returned the keys answer."),
    ("{'format': [1.0], 'answer': [1.0, 0.0]}",
     "must return in 'answer' a score from 0 to 1 for each of the texts, here 1, and returned [1.0, 0.0]."),
    ("{'format': [1.0], 'answer': [1.5]}",
     "must return in 'answer' a score from 0 to 1 for each of the texts, here 1, and returned 1.5 for text 1, an "
     "answer to question pens-1."),
    ("{'format': [1.0], 'answer': [1.0], 'short': [1.0]}", "here none; and returned the keys format, answer, short."),
    ("{'format': ['x'], 'answer': [1.0]}", "here 1, and returned ['x']."),
    ("{'format': 'xyz', 'answer': [1.0]}", "here 1, and returned 'xyz'."),
    ("{'format': iter(int, 1), 'answer': [1.0]}", "here 1, and returned <callable_it"),
    ("{'format': (1 / 0 for _ in texts), 'answer': [1.0]}", "here 1, and returned <generator ob"),
    ("{'format': 1.0, 'answer': [1.0]}", "here 1, and returned 1.0."),
    ("{'format': [10**400], 'answer': [1.0]}", "here 1, and returned [1000"),
    ("{'format': __import__('torch').ones(1, requires_grad=True), 'answer': [1.0]}", "here 1, and returned tensor("),
])  # fmt: skip
def test_a_grade_that_breaks_the_contract_is_refused(tmp_path: Path, returned: str, said: str) -> None:
    task = load(tmp_path, f"def grade(texts, questions): return {returned}")
    with pytest.raises(ConfigError, match=re.escape(said)):
        task.grade(["a"], [Question("pens-1", "?", "1")])


def test_one_wrong_score_among_many_is_found(tmp_path: Path) -> None:
    many = "[float('nan') if question.answer == '9' else 1.0 for question in questions]"
    task = load(tmp_path, f"def grade(texts, questions): return {{'format': {many}, 'answer': {many}}}")
    questions = [Question(f"pens-{n}", "?", str(n)) for n in range(16)]
    said = "'format' a score from 0 to 1 for each of the texts, here 16, and returned nan for text 10, an answer to"
    with pytest.raises(ConfigError, match=re.escape(f"{said} question pens-9.")):
        task.grade(["a"] * 16, questions)


@pytest.mark.parametrize(("function", "said"), [
    ("def grade(texts, questions): return 1 / 0", "raised ZeroDivisionError: division by zero (line 1)."),
    ("def grade(texts, questions): exit(3)", "raised SystemExit: 3 (line 1)."),
    ("def grade(texts): return 3", "raised TypeError: grade() takes 1 positional argument but 2 were given."),
])  # fmt: skip
def test_an_error_in_grade_names_the_file_and_is_no_config_error(tmp_path: Path, function: str, said: str) -> None:
    task = load(tmp_path, function)
    with pytest.raises(GraderFailed, match=re.escape(f"mine.py: grade(texts, questions) {said}")) as caught:
        task.grade(["a"], [Question("", "?", "1")])
    assert not isinstance(caught.value, ValueError), "which a command would print without the traceback"


def test_a_grade_without_a_weighted_part_is_refused(tmp_path: Path) -> None:
    task = load(tmp_path, "def weights(cfg): return {'short': 1.0}\n" + REWARD)
    with pytest.raises(ConfigError, match=r"weights\(cfg\), here short; and returned the keys format, answer\."):
        task.grade(["a"], [Question("", "?", "1")])


@pytest.mark.parametrize("tests", [", 'tests': right / 2", ""])
def test_a_grade_may_return_the_parts_that_the_task_weighs(tmp_path: Path, tests: str) -> None:
    path = str(hub_rows.write_jsonl(tmp_path / "rows.jsonl", [
        {"question": f"Q {n}?", "tests": [{"input": "", "output": "1"}]} for n in range(200)
    ]))  # fmt: skip
    task = load(tmp_path, REWARD.replace('"answer": right}', f'"answer": right{tests}}}'), name="code_io", path=path)
    rewards = task.weighted(task.grade(["a"], [Question("", "?", "a")]), ["a"])
    assert rewards.get("tests", 0.25) == 0.25


def test_a_grade_changes_neither_the_texts_nor_scores_that_it_returned(tmp_path: Path) -> None:
    text = """
import numpy as np
kept = np.zeros(2)

def grade(texts, questions):
    kept[:] = [text == "a" for text in texts]
    texts.sort()
    questions.pop()
    return {"format": kept, "answer": kept}
"""
    task, texts, questions = load(tmp_path, text), ["b", "a"], [Question("1", "?", "1"), Question("2", "?", "2")]
    first = task.grade(texts, questions)
    task.grade(["a", "b"], [*questions])
    assert (first["answer"].tolist(), texts, len(questions)) == ([0.0, 1.0], ["b", "a"], 2)


# --- the arm


def composed(*words: str) -> RunConfig:
    return make_plan([*words], False).jobs[0].config


def test_the_arm_depends_on_the_content_of_the_file_and_not_on_its_path(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    before = composed(f"task.module={file(tmp_path, REWARD)}")
    elsewhere = composed(f"task.module={file(tmp_path / 'other', REWARD)}")
    changed = composed(f"task.module={file(tmp_path, REWARD + ' ')}")
    assert config_hash(before) == config_hash(elsewhere) != config_hash(changed) != config_hash(RunConfig())
    assert settings_of_run(before)["task.module_hash"] == before.task.module_hash != changed.task.module_hash
    assert len(before.task.module_hash or "") == 12


def test_a_file_that_was_changed_or_deleted_after_composing_is_refused(tmp_path: Path) -> None:
    cfg = composed(f"task.module={file(tmp_path, REWARD)}").task
    assert tasks.load(replace(cfg, train_questions=9)).train
    file(tmp_path, REWARD + "\n")
    with pytest.raises(ConfigError, match=r"was another file when the run was composed .*Put it back as it was"):
        tasks.load(cfg)
    Path(cfg.module or "").unlink()
    with pytest.raises(ConfigError, match=r"and is gone\. Put that file there; a link to it will do"):
        tasks.load(cfg)


@pytest.mark.parametrize(("words", "said"), [
    ("task.module=nowhere.py", "task.module=nowhere.py is not there. Type the path of a Python file: task.module=FILE"),
    ("task.module=", "task.module= is no Python file"), ("task.module=text.txt", "text.txt is no Python file"),
])  # fmt: skip
def test_words_that_name_no_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file(tmp_path, REWARD)
    (tmp_path / "text.txt").touch()
    with pytest.raises(ConfigError, match=re.escape(said)):
        composed(*words.split())


def test_every_key_of_the_task_is_accepted_with_a_file_that_may_read_it(tmp_path: Path) -> None:
    module = f"task.module={file(tmp_path, REWARD + 'def train(cfg): return []')}"
    assert composed(module, "task.path=DIR", "task.columns.answer=a", "task.code_io.seconds=3").task.path == "DIR"
    assert composed(module, "task.format_reward=0", "task.answer_reward=0").task.answer_reward == 0


@pytest.mark.parametrize("word", ["task.path=DIR", "task.columns.answer=a"])
def test_a_key_that_neither_task_nor_file_reads_is_refused(tmp_path: Path, word: str) -> None:
    module = f"task.module={file(tmp_path, REWARD)}"
    with pytest.raises(ConfigError, match=r"does nothing in a run with task.name=arithmetic.* for example task=gsm8k"):
        composed(module, word)
    assert composed(module, word, "task=gsm8k").task.name == "gsm8k"
