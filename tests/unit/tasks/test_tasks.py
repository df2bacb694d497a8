"""Questions: training and held-out sets of arithmetic, rewards, and messages to the policy."""

import hashlib
import random
import re
import runpy
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qerl_lab import tasks
from qerl_lab.config import conf_folder
from qerl_lab.config.rules import from_dict
from qerl_lab.config.task import PAPER_INSTRUCTION, ArithmeticConfig, TaskConfig
from qerl_lab.tasks import arithmetic
from qerl_lab.tasks.question_sets import SOURCES

PRETRAIN = runpy.run_path(str(Path(__file__).parents[3] / "results/pocket/pretrain.py"))
DIFFICULTIES = [
    {},
    {"min_steps": 1, "max_steps": 1, "max_operand": 20},
    {"min_steps": 4, "max_steps": 6, "max_operand": 99},
]
NEW_TASK = """
from qerl_lab.tasks import Question
from qerl_lab.tasks.grading import grade_math
import numpy as np

def train(cfg):
    return [Question("echo-0", "Greet me.", "", {"greetings": ["hello", "hi"]})]

def heldout(cfg):
    return []

def grade(texts, questions):
    scores = grade_math(texts, questions)
    pairs = zip(texts, questions, strict=True)
    return scores | {"answer": np.array([float(text in question.payload["greetings"]) for text, question in pairs])}
"""


def problems(cfg: TaskConfig, count: int) -> list[arithmetic.Problem]:
    rng = random.Random(0)
    return [arithmetic.draw_problem(rng, cfg) for _ in range(count)]


def earned(task: tasks.Task, completion: str, answer: str) -> float:
    """Return the reward of one completion."""
    scores = task.grade([completion], [tasks.Question("", "?", answer)])
    return sum(part.item() for part in task.weighted(scores, [completion]).values())


def test_no_question_set_has_the_name_of_a_task_file() -> None:
    """Names in SOURCES are looked up first, so they would hide the file."""
    assert not SOURCES.keys() & {file.stem for file in Path(tasks.__file__).parent.glob("*.py")}


# --- arithmetic


def numbers(question: tasks.Question) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"\d+", question.prompt)))


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_train_and_heldout_sets_share_no_problem_no_text_and_no_numbers(difficulty: dict[str, int]) -> None:
    """Order and signs do not matter: 7 + 5 - 3 gives away 7 - 3 + 5, and much of 5 + 3 - 7."""
    cfg = TaskConfig(arithmetic=ArithmeticConfig(**difficulty))
    train, heldout = arithmetic.train(cfg), arithmetic.heldout(cfg)
    assert len(heldout) > 50
    for field in (lambda one: one.id, lambda one: one.prompt):
        assert (len({*map(field, train)}), len({*map(field, heldout)})) == (len(train), len(heldout))
        assert not {*map(field, train)} & {*map(field, heldout)}
    assert not {*map(numbers, train)} & {*map(numbers, heldout)}


def test_the_question_decides_the_split_and_the_pocket_is_taught_no_heldout_question() -> None:
    cfg = TaskConfig()
    heldout = {question.prompt for question in arithmetic.heldout(cfg)}
    taught = PRETRAIN["examples"](cfg, random.Random(0))
    assert not heldout & {next(taught).prompt for _ in range(3000)}
    drawn = problems(cfg, 3000)
    assert sum(problem.is_heldout for problem in drawn) / len(drawn) == pytest.approx(1 / 8, abs=0.03)


def test_a_smaller_training_set_is_the_beginning_of_a_larger_one() -> None:
    assert arithmetic.train(TaskConfig(train_questions=50)) == arithmetic.train(TaskConfig(train_questions=200))[:50]
    assert len(arithmetic.train(TaskConfig())) == arithmetic.TRAIN_QUESTIONS == 4096
    assert len(arithmetic.heldout(TaskConfig())) == arithmetic.HELDOUT_QUESTIONS == 1024


@pytest.mark.parametrize(
    ("asked", "count", "digest"),
    [({}, 4096, "42722d7c05bd"), ({"min_steps": 1, "max_steps": 3, "max_operand": 5}, 2046, "e3b3a733ac76")],
)
def test_a_set_that_asks_for_more_questions_than_problems_has_all_problems(
    asked: dict[str, int], count: int, digest: str
) -> None:
    """The questions are the same in every version."""
    found = arithmetic.train(TaskConfig(arithmetic=ArithmeticConfig(**asked)))
    assert len(found) == count
    rows = [(question.id, question.prompt, question.answer) for question in found]
    assert hashlib.sha256(repr(rows).encode()).hexdigest()[:12] == digest


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_problems_keep_to_the_keys_of_difficulty(difficulty: dict[str, int]) -> None:
    cfg = TaskConfig(arithmetic=ArithmeticConfig(**difficulty))
    drawn = problems(cfg, 3000)
    steps = Counter(len(problem.changes) for problem in drawn)
    assert set(steps) == set(range(cfg.arithmetic.min_steps, cfg.arithmetic.max_steps + 1))
    assert max(steps.values()) < 1.2 * min(steps.values())
    amounts = [abs(amount) for problem in drawn for amount in (problem.start, *problem.changes)]
    assert max(amounts) == cfg.arithmetic.max_operand
    for problem in drawn:
        totals = [problem.start + sum(problem.changes[: n + 1]) for n in range(len(problem.changes))]
        assert min(totals) >= 0
        assert max(totals) <= 2 * cfg.arithmetic.max_operand
    assert any(change < 0 for problem in drawn for change in problem.changes)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_every_worked_solution_is_right_and_earns_the_full_reward(difficulty: dict[str, int]) -> None:
    cfg, rng = TaskConfig(arithmetic=ArithmeticConfig(**difficulty)), random.Random(1)
    task = tasks.load(cfg)
    sums = 0
    for problem in problems(cfg, 1000):
        solution = arithmetic.worked_solution(rng, problem)
        assert earned(task, solution, str(problem.answer)) == pytest.approx(1.2)
        found = re.findall(r"(\d+)(\+|-| plus | minus )(\d+)(?:=| is )(\d+)", solution)
        for left, sign, right, result in found:
            assert int(left) + int(right) * (1 if sign in ("+", " plus ") else -1) == int(result), solution
            sums += 1
        assert not found or found[-1][-1] == str(problem.answer), solution
    assert sums > 500


def test_a_problem_has_many_worked_solutions() -> None:
    """The entropy of the embedded policy comes from them."""
    problem, rng = arithmetic.Problem(5, (7, -3, 4)), random.Random(0)
    assert len({arithmetic.worked_solution(rng, problem) for _ in range(300)}) > 50


def test_the_text_states_the_problem_and_asks_for_the_answer() -> None:
    for problem in problems(TaskConfig(), 300):
        numbers = [int(number) for number in re.findall(r"\d+", problem.text)]
        assert numbers == [problem.start, *map(abs, problem.changes)]
        gains = [" more." in sentence for sentence in re.findall(r"[^.?]+\.", problem.text)[1:]]
        assert gains == [change > 0 for change in problem.changes]
        assert problem.text.endswith("?")


def test_reward_parts_are_separate_and_configured() -> None:
    task = tasks.load(TaskConfig(format_reward=0.5, answer_reward=3.0, train_questions=1))
    texts = ["<think>x</think><answer>4</answer>", "<think>x</think><answer>5</answer>", "<answer>4</answer>", "4"]
    questions = [tasks.Question("", "?", "4")] * 4
    parts = {part: values.tolist() for part, values in task.weighted(task.grade(texts, questions), texts).items()}
    assert parts == {"format": [0.5, 0.5, 0.0, 0.0], "answer": [3.0, 0.0, 3.0, 0.0]}
    assert set(task.weights) == set(parts) == set(task.grade(texts, questions)) - {tasks.UNPARSED}


@pytest.mark.parametrize(
    ("paid", "earned_by_format"),
    [("any", [0.2, 0.2, 0.2, 0.2]), ("thought", [0.2, 0.2, 0.0, 0.0]), ("right", [0.2, 0.0, 0.2, 0.0])],
)
def test_the_format_may_be_paid_for_a_thought_or_a_right_answer_only(paid: str, earned_by_format: list[float]) -> None:
    task = tasks.load(TaskConfig(format_reward_for=paid, train_questions=1))
    texts = [f"<think>{thought}</think><answer>{given}</answer>" for thought in ("2+2", " . ") for given in "45"]
    questions = [tasks.Question("", "?", "4")] * 4
    parts = task.weighted(task.grade(texts, questions), texts)
    assert parts["format"].tolist() == pytest.approx(earned_by_format)
    assert parts["answer"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert task.grade(texts, questions)["format"].tolist() == [1.0] * 4  # an evaluation counts the format itself
    partly = task.weighted({"format": np.ones(1), "answer": np.full(1, 0.5)}, texts[:1])
    assert partly["format"].tolist() == [0.0 if paid == "right" else 0.2], "half right is not right"
    late = task.weighted({"format": np.ones(1), "answer": np.ones(1)}, ["<think> . </think>2+2</think>"])
    assert late["format"].tolist() == [0.0 if paid == "thought" else 0.2], "a thought ends at the first </think>"


def test_a_new_task_takes_one_module_and_one_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grader of the new task reads the payload of its questions."""
    (tmp_path / "echo.py").write_text(NEW_TASK)
    conf = Path(shutil.copytree(conf_folder.package_data("conf"), tmp_path / "conf"))
    (conf / "task" / "echo.yaml").write_text("# greetings\nname: echo\n")
    monkeypatch.setattr(conf_folder, "package_data", lambda name: tmp_path / name)
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    task = tasks.load(from_dict({"task": {"name": "echo", "answer_reward": 2.0}}).task)
    assert len({*task.train, *task.train}) == 1, "a question is a key, whatever its payload"
    texts = ["hello", "hi", "no"]
    parts = task.weighted(task.grade(texts, [task.train[0]] * 3), texts)
    assert {part: values.tolist() for part, values in parts.items()} == {"format": [0, 0, 0], "answer": [2, 2, 0]}


# --- messages


def test_the_instruction_is_a_system_message_unless_it_is_empty() -> None:
    question = tasks.Question("q", "How many?", "1")
    asked = tasks.load(TaskConfig(train_questions=1)).messages(question)
    assert asked == [{"role": "system", "content": PAPER_INSTRUCTION}, {"role": "user", "content": "How many?"}]
    assert tasks.load(TaskConfig(train_questions=1, instruction="")).messages(question) == asked[1:]
