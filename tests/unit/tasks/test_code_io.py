"""The task of small programs: its problems, its rows, and what a program earns."""

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

import hub_rows
from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.task import CodeIoConfig, ColumnsConfig, TaskConfig
from qerl_lab.tasks import Question, code_io, code_problems
from qerl_lab.tasks.code_problems import Problem


def pipeline(question: Question) -> str:
    """A program for a pipeline, by its words alone."""
    words = {
        "Keep only the even ones": "a = [x for x in a if x % 2 == 0]",
        "Keep only the odd ones": "a = [x for x in a if x & 1]",
        "Keep only those above zero": "a = [x for x in a if x > 0]",
        "Replace each by its square": "a = [x ** 2 for x in a]", "Sort them in ascending order": "a.sort()",
        "Sort them in descending order": "a.sort(); a.reverse()", "Reverse their order": "a.reverse()",
        "Replace each by its absolute value": "a = list(map(abs, a))",
    }  # fmt: skip
    ends = {"their sum (0 if none is left)": "sum(a)", "how many are left": "len(a)",
            "how many different values are left": "len(set(a))"}  # fmt: skip
    text = question.prompt.partition("n whole numbers. ")[2].partition("\n")[0]
    steps, _, end = text.partition(" Print ")
    said = [re.sub(r"^\(\d\) ", "", step) for step in re.split(r"\.(?: |$)", steps) if step]
    if not set(said) <= set(words) or end.rstrip(".") not in ends:
        return ""
    lines = ["input()", "a = list(map(int, input().split()))", *map(words.__getitem__, said)]
    return "\n".join([*lines, f"print({ends[end.rstrip('.')]})"])


@pytest.fixture(scope="module")
def task() -> tasks.Task:
    return tasks.load(TaskConfig(name="code_io"))


def answer(program: str) -> str:
    return f"<think>so</think>\n<answer>{program}</answer>"


def graded(program: str, question: Question) -> tuple[float, float]:
    """Every test passed, and the share that did."""
    scores = code_io.grade([answer(program)], [question])
    return scores["answer"].item(), scores["tests"].item()


def question_of(*tests: tuple[str, str], seconds: int = 10) -> Question:
    """`seconds` matter to a program that never ends; any other has time enough on a machine that does much else."""
    payload = {"inputs": [i for i, _ in tests], "outputs": [o for _, o in tests], "seconds": seconds, "memory_mib": 256}
    return Question("q", "?", "", payload)


# --- problems


def problems_of(questions: list[Question], drawn: Iterable[Problem]) -> list[Problem]:
    """The problems that the questions pose."""
    found = {f"code_io-{problem.id}": problem for problem in itertools.islice(drawn, 2 * len(questions))}
    return [found[question.id] for question in questions]


def outputs(problem: Problem) -> tuple[str, ...]:
    """The problem's outputs on inputs that `behaviour` does not have."""
    rng = random.Random(1)
    return tuple(problem.solve(code_problems.draw_input(rng, size % 14)) for size in range(48))


def test_no_held_out_problem_is_a_training_problem_in_other_words_or_with_other_constants(task: tasks.Task) -> None:
    train = problems_of(task.train, code_problems.training([1, 2, 3]))
    heldout = problems_of(task.heldout, code_problems.heldout([1, 2, 3]))
    assert not {re.sub(r"\d+", "", problem.id) for problem in train} & {
        re.sub(r"\d+", "", problem.id) for problem in heldout
    }
    for field in ("id", "text", "behaviour"):
        of_train, of_heldout = ({getattr(problem, field) for problem in part} for part in (train, heldout))
        assert (len(of_train), len(of_heldout), of_train & of_heldout) == (2048, 256, set())
    of_train, of_heldout = ({outputs(problem) for problem in part} for part in (train, heldout))
    assert len(of_train & of_heldout) <= 2  # only a rare input distinguishes these
    for level in (1, 2, 3):
        asked = list(code_problems.heldout([level]))
        assert len(asked) > 50
        assert not {problem.behaviour for problem in train} & {problem.behaviour for problem in asked}


def test_problems_are_the_same_in_every_process_and_a_smaller_set_is_the_beginning() -> None:
    few, more = (tasks.load(TaskConfig(name="code_io", train_questions=size)) for size in (20, 40))
    assert more.data["training_sha256"].startswith("96e5dd993c156831")
    assert more.train[:20] == few.train


@pytest.mark.parametrize(("level", "steps"), [(1, {0}), (2, {2, 3}), (3, {4})])
def test_levels_act(level: int, steps: set[int]) -> None:
    cfg = TaskConfig(name="code_io", train_questions=300, code_io=CodeIoConfig(level, level))
    task = tasks.load(cfg)
    assert len(task.train) == 300
    assert len(task.heldout) > 50
    assert {len(re.findall(r"\(\d\)", question.prompt)) for question in task.train} == steps


def test_the_example_is_no_test_and_no_constant_passes_more_than_half(task: tasks.Task) -> None:
    for question in task.train + task.heldout:
        outputs, inputs = question.payload["outputs"], question.payload["inputs"]
        assert len(set(inputs)) == len(outputs) == 8
        assert not any(f"Example input:\n{given}Example" in question.prompt for given in inputs)
        assert max(Counter(outputs).values()) <= 4, question.id
        assert all(output.strip() for output in outputs)


def test_pipelines_do_what_they_say(task: tasks.Task) -> None:
    pairs = [(pipeline(question), question) for question in task.train]
    pairs = [(program, question) for program, question in pairs if program][:8]
    assert len(pairs) == 8
    programs, questions = zip(*pairs, strict=True)
    assert code_io.grade([answer(program) for program in programs], questions)["answer"].tolist() == [1.0] * 8


# --- what a program earns


@pytest.mark.parametrize(("program", "earned"), [
    ("print(int(input()) * 2)", (1.0, 1.0)), ("print(4)", (0.0, 0.5)), ("print(0)", (0.0, 0.0)), ("1/0", (0.0, 0.0)),
    ("print(int(input()) * 2); 1/0", (0.0, 0.0)), ("print(int(input()) * 2, end='   \\n\\n')", (1.0, 1.0)),
    ("print(' ', int(input()) * 2)", (0.0, 0.0)), ("print('answer:', int(input()) * 2)", (0.0, 0.0)),
    ("```Python \nprint(int(input()) * 2)\n```", (1.0, 1.0)), ("Here:\n```\nprint(int(input()) * 2)```", (1.0, 1.0)),
    ("```python\r\nn = int(input())\r\nprint(n * 2)\r\n```\r\nIt doubles.", (1.0, 1.0)),
    ("```py\nfence = '```'\nprint(int(input()) * 2)\n```", (1.0, 1.0)),
    ("print('```', end='') if 0 else print(int(input()) * 2)", (1.0, 1.0)),
    ("```python\nprint(int(input()) * 2)\n```", (1.0, 1.0)), ("\n\nprint(int(input()) * 2)\n", (1.0, 1.0)),
    ("n = int(input())\nwhile n > 3: pass\nprint(n * 2)", (0.0, 0.5)),
    ("if 1 < 2: print(int(input()) * 2)", (1.0, 1.0)),
    ("x = '</think>'\nprint(int(input()) * 2)", (0.0, 0.0)),
])  # fmt: skip
def test_the_share_of_tests_and_all_of_them(program: str, earned: tuple[float, float]) -> None:
    assert graded(program, question_of(("2\n", "4"), ("5\n", "10"), seconds=2)) == earned


@pytest.mark.parametrize("completion", [
    "", "print(4)", "<answer></answer>", "<answer> \n </answer>", "<think><answer>print(4)</answer></think>",
    "<think>a<answer>print(4)</answer>", "<answer>print(4)", "</answer>print(4)<answer>",
    "<think></think><answer>" + "#" * 30_000 + "\nprint(4)</answer>", "<answer>\0</answer>", "<answer>\ud800</answer>",
    "<answer>" * 50_000, "</think>" * 50_000, "<answer>```\nprint(4)</answer>",
])  # fmt: skip
def test_hostile_completions_earn_nothing(completion: str) -> None:
    scores = code_io.grade([completion], [question_of(("2\n", "4"))])
    assert (scores["answer"].item(), scores["tests"].item()) == (0.0, 0.0)


def test_the_parts_of_the_reward_are_weighted() -> None:
    cfg = TaskConfig(name="code_io", train_questions=1, answer_reward=2.0, code_io=CodeIoConfig(tests_reward=0.25))
    task = tasks.load(cfg)
    texts = [answer("print(int(input()) * 2)"), answer("print(4)"), "print(4)"]
    rewards = task.rewards(texts, [question_of(("2\n", "4"), ("5\n", "10"))] * 3)
    assert {part: values.tolist() for part, values in rewards.items() if part != "format"} == {
        "answer": [2.0, 0.0, 0.0], "tests": [0.25, 0.125, 0.0],
    }  # fmt: skip
    assert rewards["format"].tolist() == [0.2, 0.2, 0.0]


def test_one_program_is_run_once_for_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("qerl_lab.tasks.code_sandbox.run", lambda programs: asked.append(programs) or [["4"]] * 2)
    question = question_of(("2\n", "4"))
    scores = code_io.grade([answer("print(4)"), answer("print(5)"), answer("print(4)"), ""], [question] * 4)
    assert len(asked[0]) == 2
    assert scores["tests"].tolist() == [1.0, 1.0, 1.0, 0.0]


# --- rows


def test_rows_of_ones_own(tmp_path: Path) -> None:
    rows = [
        {"question": f"Print n times {k}.", "tests": [{"input": f"{n}\n", "output": f"{n * k}\n"} for n in (2, 3)]}
        for k in range(300)
    ]
    hub_rows.write_parquet(tmp_path / "train.parquet", rows[:200])
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows[200:])
    cfg = TaskConfig(name="code_io", path=str(tmp_path), code_io=CodeIoConfig(seconds=3, memory_mib=128))
    task = tasks.load(cfg)
    assert (len(task.train), len(task.heldout)) == (200, 100)
    assert (task.train[7].payload["seconds"], task.train[7].payload["memory_mib"]) == (3, 128)
    assert graded("print(int(input()) * 7)", task.train[7]) == (1.0, 1.0)
    one_file = tasks.load(TaskConfig(name="code_io", path=str(hub_rows.write_jsonl(tmp_path / "all.jsonl", rows))))
    assert len(one_file.train) + len(one_file.heldout) == 300
    assert 0 < len(one_file.heldout) < 20


@pytest.mark.parametrize(("tests", "said"), [
    ([], "has no list of tests in 'tests'"), ("[]", "has no list of tests in 'tests'"), (None, "has no 'tests'"),
    ([{"input": "1"}], "has a test without input or output in 'tests'"), ([1], "has a test without input or output"),
    ([{"input": 1, "output": "1"}], "has a test in 'tests' whose input is no text"),
    ([{"input": "1", "output": 1}], "has no text in 'tests', but int"),
    ([{"input": "1", "output": "\n"}], "has nothing in 'tests'"),
])  # fmt: skip
def test_a_row_with_bad_tests_is_named(tmp_path: Path, tests: object, said: str) -> None:
    good = {"question": "Q", "tests": [{"input": "", "output": "1"}]}
    rows = [good | {"question": f"Q{n}"} for n in range(200)] + [{"question": "bad", "tests": tests}]
    hub_rows.write_jsonl(tmp_path / "test.jsonl", rows)
    task = tasks.load_benchmark(TaskConfig(name="code_io", path=str(tmp_path)))
    assert f"test.jsonl:201 {said}" in task.warnings[0]


def test_the_tests_may_lie_in_a_struct(tmp_path: Path) -> None:
    rows = [{"q": f"Q{n}", "info": {"cases": [{"input": "", "output": "1"}]}} for n in range(3)]
    path = str(hub_rows.write_jsonl(tmp_path / "test.jsonl", rows).parent)
    columns = ColumnsConfig(question="q", tests="info.cases")
    assert len(tasks.load_benchmark(TaskConfig(name="code_io", path=path, columns=columns)).heldout) == 3


def test_no_sandbox_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ConfigError("cannot confine them")

    monkeypatch.setattr("qerl_lab.tasks.code_sandbox.check", fail)
    with pytest.raises(ConfigError, match="cannot confine them"):
        tasks.load(TaskConfig(name="code_io"))
