"""Seeded multi-step word problems of addition and subtraction, with worked solutions.

A problem is defined by its numbers: a start and signed changes. Names and things in the text are a function of these
numbers, so one problem has one text. One in eight multisets of stated numbers is held out, chosen by hash. So no
held-out problem has the numbers of a training problem in another order or with other signs, for any seed.

`results/pocket/pretrain.py` trained the embedded policy, which is part of the package, on `worked_solution`.
"""

import hashlib
import random
from dataclasses import dataclass, replace
from itertools import accumulate

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks.grading import grade_math as grade
from qerl_lab.tasks.questions import Question, is_heldout

__all__ = ["Problem", "draw_problem", "grade", "heldout", "train", "worked", "worked_question", "worked_solution"]

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 4096, 1024
DRAWS = 50  # for each problem asked for; then as many are returned as were found
NAMES = ["Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
GAINS = ["buys {} more", "finds {} more", "gets {} more", "wins {} more"]
LOSSES = ["gives away {}", "loses {}", "sells {}", "drops {}"]
METHODS, WEIGHTS = ["in order", "any order", "together", "in the head"], [6, 1.5, 1, 1.5]  # of a worked solution


@dataclass(frozen=True)
class Problem:
    """A word problem: someone has `start` things, then gains (positive) or loses (negative) each of `changes`.

    The running total never falls below zero.
    """

    start: int
    changes: tuple[int, ...]

    @property
    def id(self) -> str:
        """Return the problem's numbers as text, e.g. "7+5-3"."""
        return f"{self.start}" + "".join(f"{change:+d}" for change in self.changes)

    @property
    def is_heldout(self) -> bool:
        """Tell whether the problem is held out, by a hash of its numbers, sorted and without signs."""
        return is_heldout(" ".join(map(str, sorted((self.start, *map(abs, self.changes))))))

    @property
    def answer(self) -> int:
        """Return the number of things at the end."""
        return self.start + sum(self.changes)

    @property
    def question(self) -> Question:
        """Return the problem as a Question: its id, its text, and the answer as text."""
        return Question(self.id, self.text, str(self.answer))

    @property
    def text(self) -> str:
        """Return the question in words, e.g. "Ann has 7 pens. Ann buys 5 more. How many pens does Ann have?"."""
        pick = random.Random(hashlib.sha256(self.id.encode()).digest())
        name, thing = pick.choice(NAMES), pick.choice(THINGS)
        happens = [pick.choice(GAINS if change > 0 else LOSSES).format(abs(change)) for change in self.changes]
        first, *rest = [f"{name} {what}." for what in happens]
        story = " ".join([f"{name} has {self.start} {thing}.", first, *(f"Then {sentence}" for sentence in rest)])
        return f"{story} How many {thing} does {name} have?"


def draw_problem(rng: random.Random, cfg: TaskConfig) -> Problem:
    """Draw a problem of `min_steps` to `max_steps` changes; each number of changes is equally likely.

    Running totals stay between 0 and twice `max_operand`. All three limits are keys of `cfg.arithmetic`.
    """
    largest, steps = cfg.arithmetic.max_operand, (cfg.arithmetic.min_steps, cfg.arithmetic.max_steps)
    start = rng.randint(2, largest)
    total, changes = start, []
    for _ in range(rng.randint(*steps)):
        amount = rng.randint(1, largest)
        loses = amount <= total and (total + amount > 2 * largest or rng.random() < 0.5)
        change = -amount if loses else amount
        total += change
        changes.append(change)
    return Problem(start, tuple(changes))


def train(cfg: TaskConfig) -> list[Question]:
    """Return `cfg.train_questions` distinct problems (0: 4096) that are not held out; fewer at a low difficulty."""
    return [problem.question for problem in _distinct(cfg, of_heldout=False)]


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return 1024 distinct held-out problems; fewer at a low difficulty."""
    return [problem.question for problem in _distinct(cfg, of_heldout=True)]


def worked(cfg: TaskConfig) -> list[Question]:
    """Return the questions of `train`, each with a worked solution in `payload["solution"]`."""
    rng = random.Random(0)
    return [worked_question(rng, problem) for problem in _distinct(cfg, of_heldout=False)]


def worked_question(rng: random.Random, problem: Problem) -> Question:
    """Convert a problem to a Question with a worked solution in `payload["solution"]`."""
    return replace(problem.question, payload={"solution": worked_solution(rng, problem)})


def _distinct(cfg: TaskConfig, of_heldout: bool) -> list[Problem]:
    """Draw distinct problems with a fixed seed: 1024 held-out ones if `of_heldout`, else `cfg.train_questions` others.

    `cfg.train_questions`=0 means 4096. Returns fewer if DRAWS draws for each find no more.
    """
    count = HELDOUT_QUESTIONS if of_heldout else cfg.train_questions or TRAIN_QUESTIONS
    rng, found = random.Random(2510_11696), dict[Problem, None]()
    for _ in range(DRAWS * count):
        drawn = draw_problem(rng, cfg)
        if drawn.is_heldout == of_heldout:
            found[drawn] = None
        if len(found) == count:
            break
    return list(found)


def worked_solution(rng: random.Random, problem: Problem) -> str:
    """Write a correct solution of a problem as `<think>..</think><answer>..</answer>`; method and words vary at random.

    Because the solutions vary, a small model trained on them has about the output entropy of a real language model. It
    also has something to explore, because its shorter solutions go wrong more often.
    """
    method = rng.choices(METHODS, WEIGHTS)[0]
    if method == "in the head":
        work = rng.choice(["in my head", "quick sum", "easy"]) + "."
    elif method == "together" and len(problem.changes) > 2:  # the gains, the losses, then both sums
        gains = [change for change in problem.changes if change > 0]
        losses = [-change for change in problem.changes if change < 0]
        sums = [_chain(rng, part[0], part[1:]) for part in (gains, losses) if len(part) > 1]
        totals = [total for total in (sum(gains), -sum(losses)) if total]
        work = " ".join([*sums, _chain(rng, problem.start, totals)])
    else:
        order = list(problem.changes)
        while method == "any order":
            order = rng.sample(problem.changes, len(problem.changes))
            if min(accumulate(order, initial=problem.start)) >= 0:  # no total is below zero
                break
        work = _chain(rng, problem.start, order)
    return f"<think>{work}</think><answer>{problem.answer}</answer>"


def _chain(rng: random.Random, start: int, changes: list[int]) -> str:
    """Write the calculations that apply `changes` to `start` one after another, e.g. "7+5=12. 12 minus 3 is 9."."""
    total, lines = start, []
    for change in changes:
        if change > 0:
            left, right = rng.sample((total, change), 2)
            forms = [f"{left}+{right}={left + right}", f"{left} plus {right} is {left + right}"]
        else:
            forms = [f"{total}-{-change}={total + change}", f"{total} minus {-change} is {total + change}"]
        lines.append(rng.choice(forms))
        total += change
    return rng.choice(["", "so "]) + rng.choice([". ", ", then "]).join(lines) + "."
