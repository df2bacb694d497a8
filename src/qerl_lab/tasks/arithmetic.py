"""Seeded multi-step word problems of adding and taking away; `worked_solution` is what the pocket policy is taught.

A problem is its numbers: a start and a list of signed changes. The names and things around them are a function of
those numbers, so one problem reads the same everywhere. The held-out set takes one multiset of stated numbers in
eight, by hash: no held-out problem has the numbers of a training problem in another order or with other signs, whatever
the seed.
"""

import hashlib
import random
import re
from dataclasses import dataclass, replace

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question, is_heldout
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["Problem", "grade", "heldout", "problem", "train", "worked", "worked_solution"]

TRAIN_QUESTIONS, HELDOUT_QUESTIONS = 4096, 1024
PATIENCE = 10_000  # draws without a new problem, and ten for each known one, say that there are no more
NAMES = ["Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gita", "Hugo"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
GAINS = ["buys {} more", "finds {} more", "gets {} more", "wins {} more"]
WAYS, WEIGHTS = ["in order", "any order", "together", "in the head"], [6, 1.5, 1, 1.5]
LOSSES = ["gives away {}", "loses {}", "sells {}", "drops {}"]


@dataclass(frozen=True)
class Problem:
    """`start` things, then `changes` of them (positive is a gain); the total never falls below zero."""

    start: int
    changes: tuple[int, ...]

    @property
    def id(self) -> str:
        return f"{self.start}" + "".join(f"{change:+d}" for change in self.changes)

    @property
    def is_heldout(self) -> bool:
        """Whether no training may draw it: decided by the numbers that the text states, sorted and without signs."""
        return is_heldout(" ".join(map(str, sorted((self.start, *map(abs, self.changes))))))

    @property
    def answer(self) -> int:
        return self.start + sum(self.changes)

    @property
    def text(self) -> str:
        """The question in words, e.g. "Ann has 7 pens. Ann buys 5 more. Then Ann loses 3. How many pens now?"."""
        pick = random.Random(hashlib.sha256(self.id.encode()).digest())
        name, thing = pick.choice(NAMES), pick.choice(THINGS)
        happens = [pick.choice(GAINS if change > 0 else LOSSES).format(abs(change)) for change in self.changes]
        first, *rest = [f"{name} {what}." for what in happens]
        story = " ".join([f"{name} has {self.start} {thing}.", first, *(f"Then {sentence}" for sentence in rest)])
        return f"{story} How many {thing} does {name} have?"


def problem(rng: random.Random, cfg: TaskConfig) -> Problem:
    """One problem, uniform over the number of steps; its total stays between zero and twice the largest operand."""
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
    """`cfg.train_questions` distinct problems (0: 4096) outside the held-out set."""
    return _questions(cfg, cfg.train_questions or TRAIN_QUESTIONS, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """1024 distinct held-out problems, or all there are at a small difficulty."""
    return _questions(cfg, HELDOUT_QUESTIONS, of_heldout=True)


def worked(cfg: TaskConfig) -> list[Question]:
    """The training problems, each with one of its solutions."""
    rng = random.Random(0)
    return [replace(one, payload={"solution": worked_solution(rng, _of(one.id))}) for one in train(cfg)]


def _of(id: str) -> Problem:
    start, *changes = map(int, re.findall(r"[+-]?\d+", id))
    return Problem(start, tuple(changes))


def _questions(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Question]:
    """`count` distinct problems, or as many as there are: a small difficulty has fewer."""
    rng, found, since_new = random.Random(2510_11696), dict[str, Question](), 0
    for _ in range(50 * count):
        drawn, known = problem(rng, cfg), len(found)
        if drawn.id not in found and drawn.is_heldout == of_heldout:
            found[drawn.id] = Question(drawn.id, drawn.text, str(drawn.answer))
        since_new = 0 if len(found) > known else since_new + 1
        if len(found) == count or since_new == PATIENCE + 10 * len(found):
            break
    return list(found.values())


def worked_solution(rng: random.Random, of: Problem) -> str:
    """One of many right ways to work a problem out, in the paper's format.

    There are real alternatives at every turn, as in human solutions. They are the order of the changes, whether gains
    and losses are first brought together, how a sum is written, and how much is written down at all. They give a
    policy taught on them the entropy that a real model has, and something for exploration to choose between: the
    shorter ways go wrong more often.
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
    """The changes in a random order in which the total never falls below zero."""
    while True:
        order = rng.sample(of.changes, len(of.changes))
        if all(of.start + sum(order[: n + 1]) >= 0 for n in range(len(order))):
            return order


def _together(rng: random.Random, of: Problem) -> str:
    """Gains and losses brought together first, then applied."""
    gains, losses = [c for c in of.changes if c > 0], [-c for c in of.changes if c < 0]
    sums = [_chain(rng, part[0], part[1:]) for part in (gains, losses) if len(part) > 1]
    return " ".join([*sums, _chain(rng, of.start, [c for c in (sum(gains), -sum(losses)) if c])])


def _chain(rng: random.Random, start: int, changes: list[int]) -> str:
    total, lines = start, []
    for change in changes:
        lines.append(_sum(rng, total, change))
        total += change
    return rng.choice(["", "so "]) + rng.choice([". ", ", then "]).join(lines) + "."


def _sum(rng: random.Random, total: int, change: int) -> str:
    if change > 0:
        left, right = rng.sample((total, change), 2)
        return rng.choice([f"{left}+{right}={left + right}", f"{left} plus {right} is {left + right}"])
    return rng.choice([f"{total}-{-change}={total + change}", f"{total} minus {-change} is {total + change}"])
