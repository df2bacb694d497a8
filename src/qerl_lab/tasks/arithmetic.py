"""Seeded multi-step word problems of addition and subtraction; the pocket policy is trained on `worked_solution`.

A problem is defined by its numbers: a start and signed changes. Names and things in the text are a function of these
numbers, so one problem has one text. The held-out set is one in eight multisets of stated numbers, chosen by hash: no
held-out problem has the numbers of a training problem in another order or with other signs, for any seed.
"""

import hashlib
import random
from dataclasses import dataclass, replace

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks.grading import grade_math as grade
from qerl_lab.tasks.questions import Question, is_heldout

__all__ = ["Problem", "grade", "heldout", "problem", "train", "worked", "worked_question", "worked_solution"]

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 4096, 1024
PATIENCE = 10_000  # stop after this many draws, plus ten per known problem, without a new problem
NAMES = ["Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
GAINS = ["buys {} more", "finds {} more", "gets {} more", "wins {} more"]
WAYS, WEIGHTS = ["in order", "any order", "together", "in the head"], [6, 1.5, 1, 1.5]
LOSSES = ["gives away {}", "loses {}", "sells {}", "drops {}"]


@dataclass(frozen=True)
class Problem:
    """`start` things, then `changes` to their number (positive is a gain); the total never falls below zero."""

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


def problem(rng: random.Random, cfg: TaskConfig) -> Problem:
    """Draw a problem, uniform over the number of changes, with totals between 0 and twice the largest operand."""
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
    """Return `cfg.train_questions` (0: 4096) distinct problems that are not held out; fewer if there are no more."""
    return [of.question for of in _train_problems(cfg)]


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return 1024 distinct held-out problems, or all there are at a low difficulty."""
    return [of.question for of in _distinct(cfg, HELDOUT_QUESTIONS, of_heldout=True)]


def worked(cfg: TaskConfig) -> list[Question]:
    """Return the training problems, each with a worked solution in `payload["solution"]`."""
    rng = random.Random(0)
    return [worked_question(rng, of) for of in _train_problems(cfg)]


def worked_question(rng: random.Random, of: Problem) -> Question:
    """Return the problem `of` as a Question with a worked solution in `payload["solution"]`."""
    return replace(of.question, payload={"solution": worked_solution(rng, of)})


def _train_problems(cfg: TaskConfig) -> list[Problem]:
    """Draw `cfg.train_questions` distinct training problems, TRAIN_QUESTIONS of them if it is 0."""
    return _distinct(cfg, cfg.train_questions or TRAIN_QUESTIONS, of_heldout=False)


def _distinct(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Problem]:
    """Draw `count` distinct problems, all held out or none, with a fixed seed; fewer if the difficulty has no more."""
    rng, found, since_new = random.Random(2510_11696), dict[Problem, None](), 0
    for _ in range(50 * count):
        drawn, since_new = problem(rng, cfg), since_new + 1
        if drawn not in found and drawn.is_heldout == of_heldout:
            found[drawn], since_new = None, 0
        if len(found) == count or since_new == PATIENCE + 10 * len(found):
            break
    return list(found)


def worked_solution(rng: random.Random, of: Problem) -> str:
    """Write one of many correct solutions of the problem `of`, as `<think>..</think><answer>..</answer>`.

    The variety gives a policy trained on it the entropy of a real model, and something to explore: shorter solutions go
    wrong more often.
    """
    way = rng.choices(WAYS, WEIGHTS)[0]
    if way == "in the head":
        work = rng.choice(["in my head", "quick sum", "easy"]) + "."
    elif way == "together" and len(of.changes) > 2:
        work = _together(rng, of)
    else:
        work = _chain(rng, of.start, _ordered(rng, of) if way == "any order" else list(of.changes))
    return f"<think>{work}</think><answer>{of.answer}</answer>"


def _ordered(rng: random.Random, of: Problem) -> list[int]:
    """Return the changes of the problem `of` in a random order in which the total never falls below zero."""
    while True:
        order = rng.sample(of.changes, len(of.changes))
        if all(of.start + sum(order[: n + 1]) >= 0 for n in range(len(order))):
            return order


def _together(rng: random.Random, of: Problem) -> str:
    """Write the work of a solution that sums gains and losses separately, then applies both sums to the start."""
    gains, losses = [c for c in of.changes if c > 0], [-c for c in of.changes if c < 0]
    sums = [_chain(rng, part[0], part[1:]) for part in (gains, losses) if len(part) > 1]
    return " ".join([*sums, _chain(rng, of.start, [c for c in (sum(gains), -sum(losses)) if c])])


def _chain(rng: random.Random, start: int, changes: list[int]) -> str:
    """Write the sums that apply `changes` to `start` in turn, e.g. "7+5=12. 12-3=9."."""
    total, lines = start, []
    for change in changes:
        lines.append(_sum(rng, total, change))
        total += change
    return rng.choice(["", "so "]) + rng.choice([". ", ", then "]).join(lines) + "."


def _sum(rng: random.Random, total: int, change: int) -> str:
    """Write `total` plus a signed `change`, e.g. "7+5=12" or "12 minus 3 is 9"."""
    if change > 0:
        left, right = rng.sample((total, change), 2)
        return rng.choice([f"{left}+{right}={left + right}", f"{left} plus {right} is {left + right}"])
    return rng.choice([f"{total}-{-change}={total + change}", f"{total} minus {-change} is {total + change}"])
