"""Generated programming problems: steps over a list of numbers, a reference solution, and inputs to test programs on.

The kinds of its steps, without their constants, decide whether a problem is held out. So no held-out problem is a
training problem with another constant. Two problems may ask for the same in other words (sort, then the last; or the
largest): `Problem.behaviour` detects it, and `training` and `heldout` yield one of them.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from qerl_lab.tasks.questions import is_heldout

Numbers = list[int]
STEPS_OF_LEVEL = {1: (1, 1), 2: (2, 3), 3: (4, 4)}  # fewest and most steps
CONSTANTS = (2, 3, 4, 5, 6, 7, 9, 10)
HELDOUT_OF_A_LEVEL = 320  # more than are asked for, because a few problems have no tests
SEED, PATIENCE = 2510_11696, 3000  # stop after PATIENCE draws without a new problem
PROBES = range(2, 18)  # input sizes to compare problems on; few, so that rare differences do not count
STEPS: dict[str, tuple[str, Callable[[Numbers, int], Numbers]]] = {
    "even": ("Keep only the even ones", lambda a, k: [x for x in a if x % 2 == 0]),
    "odd": ("Keep only the odd ones", lambda a, k: [x for x in a if x % 2]),
    "positive": ("Keep only those above zero", lambda a, k: [x for x in a if x > 0]),
    "above": ("Keep only those greater than {k}", lambda a, k: [x for x in a if x > k]),
    "below": ("Keep only those less than {k}", lambda a, k: [x for x in a if x < k]),
    "undivided": ("Remove those that {k} divides", lambda a, k: [x for x in a if x % k]),
    "times": ("Multiply each by {k}", lambda a, k: [x * k for x in a]),
    "plus": ("Add {k} to each", lambda a, k: [x + k for x in a]),
    "square": ("Replace each by its square", lambda a, k: [x * x for x in a]),
    "absolute": ("Replace each by its absolute value", lambda a, k: [abs(x) for x in a]),
    "modulo": ("Replace each by its remainder modulo {k}, from 0 to {k} - 1", lambda a, k: [x % k for x in a]),
    "digits": ("Replace each by the sum of its decimal digits", lambda a, k: [sum(map(int, str(abs(x)))) for x in a]),
    "sort": ("Sort them in ascending order", lambda a, k: sorted(a)),
    "descend": ("Sort them in descending order", lambda a, k: sorted(a, reverse=True)),
    "reverse": ("Reverse their order", lambda a, k: a[::-1]),
    "unique": ("Of equal ones keep only the first", lambda a, k: list(dict.fromkeys(a))),
    "every": ("Keep the 1st, the 3rd, the 5th and so on", lambda a, k: a[::2]),
    "totals": ("Replace each by the sum of all up to it, itself included", lambda a, k: list(itertools.accumulate(a))),
    "steps": ("Replace them by the differences of neighbours, right minus left",
              lambda a, k: [right - left for left, right in itertools.pairwise(a)]),
    "first": ("Keep only the first {k} (all, where there are fewer)", lambda a, k: a[:k]),
}  # fmt: skip
ENDS: dict[str, tuple[str, Callable[[Numbers], Any]]] = {
    "sum": ("their sum (0 if none is left)", sum),
    "count": ("how many are left", len),
    "largest": ("the largest, or `none` if none is left", lambda a: max(a, default="none")),
    "smallest": ("the smallest, or `none` if none is left", lambda a: min(a, default="none")),
    "distinct": ("how many different values are left", lambda a: len(set(a))),
    "span": ("the largest minus the smallest (0 if none is left)", lambda a: max(a) - min(a) if a else 0),
    "second": ("the second largest of the different values, or `none`",
               lambda a: sorted(set(a))[-2] if len(set(a)) > 1 else "none"),
    "all": ("them, separated by spaces, or `none` if none is left", lambda a: " ".join(map(str, a)) or "none"),
    "last": ("the last one, or `none` if none is left", lambda a: a[-1] if a else "none"),
}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """`steps` of STEPS with their constants, then one of ENDS."""

    steps: tuple[tuple[str, int], ...]
    end: str

    @property
    def id(self) -> str:
        return "-".join([*(f"{name}{k}" if "{k}" in STEPS[name][0] else name for name, k in self.steps), self.end])

    @property
    def is_heldout(self) -> bool:
        return is_heldout("-".join([*(name for name, _ in self.steps), self.end]))

    @property
    def text(self) -> str:
        said = [STEPS[name][0].format(k=k) for name, k in self.steps]
        steps = f"{said[0]}." if len(said) == 1 else " ".join(f"({n}) {step}." for n, step in enumerate(said, start=1))
        return (
            "The first line of the input has a whole number n, the second line has n whole numbers. "
            f"{steps} Print {ENDS[self.end][0]}."
        )

    def solve(self, given: str) -> str:
        """Return the output for an input."""
        values = list(map(int, given.split()[1:]))
        for name, k in self.steps:
            values = STEPS[name][1](values, k)
        return str(ENDS[self.end][1](values))

    @cached_property
    def behaviour(self) -> tuple[str, ...]:
        """The outputs on fixed inputs: what the problem asks for, independent of its words."""
        return tuple(map(self.solve, _probes()))


def draw(rng: random.Random, level: int) -> Problem:
    """Draw a problem of a level, 1 to 3."""
    names = rng.sample(sorted(STEPS), rng.randint(*STEPS_OF_LEVEL[level]))
    return Problem(tuple((name, rng.choice(CONSTANTS)) for name in names), rng.choice(sorted(ENDS)))


def draw_input(rng: random.Random, size: int) -> str:
    """Draw an input, smallest for size 0."""
    count = min(size, 4) + rng.randint(1, 3) if size < 6 else rng.randint(10, 40)
    largest = 9 if size < 3 else 99
    return f"{count}\n{' '.join(str(rng.randint(-largest, largest)) for _ in range(count))}\n"


@cache
def _probes() -> list[str]:
    rng = random.Random(0)
    return [draw_input(rng, size) for size in PROBES]


def tests(problem: Problem, count: int) -> list[tuple[str, str]] | None:
    """Return an example and `count` further tests (input, output), determined by the problem.

    Returns None if one output is right for more than half of the tests in every attempt: a program that prints a
    constant would earn too much.
    """
    for attempt in range(20):
        rng, found = random.Random(f"{problem.id} {attempt}"), dict[str, str]()
        for size in itertools.chain([2], range(3 * count)):
            given = draw_input(rng, size)
            found.setdefault(given, problem.solve(given))
            if len(found) == count + 1:
                break
        commonest = Counter(list(found.values())[1:]).most_common(1)
        if len(found) == count + 1 and commonest[0][1] <= max(1, count // 2):
            return list(found.items())
    return None


def training(levels: Sequence[int]) -> Iterator[Problem]:
    """Yield training problems of the levels, none with the behaviour of a held-out problem of any level."""
    known = {problem.behaviour for level in STEPS_OF_LEVEL for problem in _heldout_of(level)}
    return _distinct(random.Random(SEED), levels, of_heldout=False, known=known)


def heldout(levels: Sequence[int]) -> Iterator[Problem]:
    """Yield held-out problems of the levels in turn, no two with equal behaviour."""
    known = set[tuple[str, ...]]()
    for problem in itertools.chain(*itertools.zip_longest(*map(_heldout_of, levels))):
        if problem is not None and problem.behaviour not in known:
            known.add(problem.behaviour)
            yield problem


@cache
def _heldout_of(level: int) -> tuple[Problem, ...]:
    """Return the held-out problems of a level, independent of other settings, so that no setting trains on them."""
    found = _distinct(random.Random(f"{SEED} {level}"), [level], of_heldout=True, known=set())
    return tuple(itertools.islice(found, HELDOUT_OF_A_LEVEL))


def _distinct(
    rng: random.Random, levels: Sequence[int], of_heldout: bool, known: set[tuple[str, ...]]
) -> Iterator[Problem]:
    """Yield drawn problems of one role with behaviours not in `known`, until PATIENCE draws find none."""
    drawn, since_new = set[str](), 0
    while since_new < PATIENCE:
        problem, since_new = draw(rng, rng.choice(levels)), since_new + 1
        if problem.id in drawn or problem.is_heldout != of_heldout:
            continue
        drawn.add(problem.id)
        if problem.behaviour not in known:
            known.add(problem.behaviour)
            since_new = 0
            yield problem
