"""Generated programming problems: a text, a reference solution, and inputs to test programs on.

Level 1 has pipelines over a list of numbers with one step, level 2 pipelines with two or three steps and text problems,
level 3 short algorithms. The shape of a problem decides whether it is held out; a pipeline's shape is the kinds of its
steps, without their constants. So no held-out pipeline is a training problem with another constant. Two shapes may ask
for the same (`sort`, then the last; or the largest): `behaviour` detects it, and code_io.py keeps such problems apart.
"""

import itertools
import random
import string
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from qerl_lab.tasks.questions import is_heldout

Numbers = list[int]
HOLES = (2, 3, 4, 5, 6, 7, 9, 10)  # constants in a step
PROBES = range(2, 18)  # input sizes to compare problems on; few, so that rare differences do not count
LIST_INPUT = "The first line of the input has a whole number n, the second line has n whole numbers."


@dataclass(frozen=True)
class Problem:
    """A problem: `solve` maps an input to its output, `draw(rng, size)` draws an input, smallest for size 0."""

    id: str
    shape: str
    text: str
    solve: Callable[[str], str]
    draw: Callable[[random.Random, int], str]  # the same function for all problems with this kind of input

    @property
    def is_heldout(self) -> bool:
        return is_heldout(self.shape)

    @cached_property
    def behaviour(self) -> Hashable:
        """What the problem asks for, independent of its text: its kind of input and its outputs on PROBES."""
        return self.draw, tuple(map(self.solve, _probes(self.draw)))


@cache
def _probes(draw: Callable[[random.Random, int], str]) -> list[str]:
    """Return fixed inputs of a kind."""
    rng = random.Random(0)
    return [draw(rng, size) for size in PROBES]


def tests(problem: Problem, count: int) -> list[tuple[str, str]] | None:
    """Return an example and `count` further tests (input, output), determined by the problem.

    Returns None if one output is right for more than half of the tests in every attempt: a program that prints a
    constant would earn too much.
    """
    for attempt in range(20):
        rng, found = random.Random(f"{problem.id} {attempt}"), dict[str, str]()
        for size in itertools.chain([2], range(3 * count)):
            given = problem.draw(rng, size)
            found.setdefault(given, problem.solve(given))
            if len(found) == count + 1:
                break
        commonest = Counter(list(found.values())[1:]).most_common(1)
        if len(found) == count + 1 and commonest[0][1] <= max(1, count // 2):
            return list(found.items())
    return None


def draw_problem(rng: random.Random, level: int) -> Problem:
    """Draw a problem of a level, 1 to 3."""
    return rng.choice(FAMILIES[level])(rng)


# --- pipelines

Step = tuple[str, Callable[[Numbers, int], Numbers]]
STEPS: dict[str, Step] = {
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


def _numbers(rng: random.Random, size: int) -> str:
    count = min(size, 4) + rng.randint(1, 3) if size < 6 else rng.randint(10, 40)
    largest = 9 if size < 3 else 99
    return f"{count}\n{' '.join(str(rng.randint(-largest, largest)) for _ in range(count))}\n"


def _list(text: str) -> Numbers:
    return list(map(int, text.split()[1:]))


def _pipeline(fewest: int, most: int) -> Callable[[random.Random], Problem]:
    """Return a maker of problems with `fewest` to `most` steps over a list of numbers."""

    def make(rng: random.Random) -> Problem:
        names = rng.sample(sorted(STEPS), rng.randint(fewest, most))
        chosen = [(name, rng.choice(HOLES)) for name in names]
        end = rng.choice(sorted(ENDS))

        def solve(text: str) -> str:
            values = _list(text)
            for name, k in chosen:
                values = STEPS[name][1](values, k)
            return str(ENDS[end][1](values))

        said = [STEPS[name][0].format(k=k) for name, k in chosen]
        stated = [f"{name}{k}" if "{k}" in STEPS[name][0] else name for name, k in chosen]
        steps = f"{said[0]}." if len(said) == 1 else " ".join(f"({n}) {step}." for n, step in enumerate(said, start=1))
        text = f"{LIST_INPUT} {steps} Print {ENDS[end][0]}."
        return Problem("-".join([*stated, end]), "-".join([*names, end]), text, solve, _numbers)

    return make


# --- texts


def _words(rng: random.Random, size: int) -> str:
    letters = "ab" if size < 3 else "abcde" if size < 6 else string.ascii_lowercase
    words = ["".join(rng.choices(letters, k=rng.randint(1, 2 + min(size, 6)))) for _ in range(1 + min(size, 12))]
    return " ".join(words) + "\n"


def _caesar(rng: random.Random) -> Problem:
    k = rng.randint(1, 25)
    table = str.maketrans(string.ascii_lowercase, string.ascii_lowercase[k:] + string.ascii_lowercase[:k])
    text = (f"The input is one line of words of lower-case letters. Move every letter {k} places on in the alphabet, "
            "where `a` follows `z`, and print the line.")  # fmt: skip
    return Problem(f"caesar-{k}", f"caesar-{k}", text, lambda s: s.strip().translate(table), _words)


def _letters(rng: random.Random) -> Problem:
    counted = "".join(sorted(rng.sample("abcde", rng.randint(1, 3))))
    text = (f"The input is one line of words of lower-case letters. Print how often the letters {', '.join(counted)} "
            "occur in it, all together.")  # fmt: skip
    name = f"letters-{counted}"
    return Problem(name, name, text, lambda s: str(sum(letter in counted for letter in s)), _words)


TURNS: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    "reversed": ("the words in reverse order, separated by spaces", lambda w: " ".join(w[::-1])),
    "mirrored": ("every word backwards, in the same order", lambda w: " ".join(word[::-1] for word in w)),
    "alphabet": ("the words in alphabetical order, separated by spaces", lambda w: " ".join(sorted(w))),
    "longest": ("the longest word, of several the first", lambda w: max(w, key=len)),
    "runs": ("every word with each run of one letter replaced by the letter and the length of the run, as in "
             "`aab` to `a2b1`", lambda w: " ".join("".join(f"{c}{len(list(g))}" for c, g in itertools.groupby(word))
                                                    for word in w)),
    "commonest": ("the letter that occurs most often in all words, of several the first in the alphabet",
                  lambda w: min(Counter("".join(w)).items(), key=lambda pair: (-pair[1], pair[0]))[0]),
    "palindromes": ("how many words read the same backwards", lambda w: sum(word == word[::-1] for word in w)),
    "lengths": ("the lengths of the words, separated by spaces", lambda w: " ".join(str(len(word)) for word in w)),
    "initials": ("the first letters of the words, as one word", lambda w: "".join(word[0] for word in w)),
    "different": ("how many different words there are", lambda w: len(set(w))),
}  # fmt: skip
CHOSEN: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "whole": ("Print", lambda w: w),
    "long": ("Of the first word and all others with two letters or more print",
             lambda w: w[:1] + [word for word in w[1:] if len(word) > 1]),
    "second": ("Of the 1st, the 3rd, the 5th word and so on print", lambda w: w[::2]),
    "once": ("Leave out every word that occurred before it in the line. Of the others print",
             lambda w: list(dict.fromkeys(w))),
}  # fmt: skip


def _turned(rng: random.Random) -> Problem:
    turn, chosen = rng.choice(sorted(TURNS)), rng.choice(sorted(CHOSEN))
    text = f"The input is one line of words of lower-case letters. {CHOSEN[chosen][0]} {TURNS[turn][0]}."
    name = f"words-{chosen}-{turn}"
    return Problem(name, name, text, lambda s: str(TURNS[turn][1](CHOSEN[chosen][1](s.split()))), _words)


# --- algorithms


def _coins(rng: random.Random) -> Problem:
    coins = sorted(rng.sample(range(2, 10), rng.randint(2, 3)))
    fewest = rng.random() < 0.5

    def smallest(total: int) -> int:
        needed = [0] + [total + 1] * total  # coins per amount; total + 1 means impossible
        for coin in coins:
            for amount in range(coin, total + 1):
                needed[amount] = min(needed[amount], needed[amount - coin] + 1)
        return needed[total] if needed[total] <= total else -1

    def ways(total: int) -> int:
        counts = [1] + [0] * total
        for coin in coins:
            for amount in range(coin, total + 1):
                counts[amount] += counts[amount - coin]
        return counts[total]

    solve = smallest if fewest else ways
    asked = ("the smallest number of coins that make exactly this amount, or -1 if none do" if fewest else
             "in how many ways coins can make exactly this amount; the order of the coins does not count")  # fmt: skip
    text = (f"There are coins of {', '.join(map(str, coins))}, as many of each as you like. The input is an amount, a "
            f"whole number from 0 to 200. Print {asked}.")  # fmt: skip
    name = f"coins-{'fewest' if fewest else 'ways'}-{'-'.join(map(str, coins))}"
    return Problem(name, name, text, lambda amount: str(solve(int(amount))), _money)


def _money(rng: random.Random, size: int) -> str:
    return f"{rng.randint(0, 12 if size < 3 else 200)}\n"


def _grid(rng: random.Random, size: int) -> str:
    rows, columns = (rng.randint(1, 3 + min(size, 6)) for _ in range(2))
    cells = [["#" if rng.random() < 0.25 else "." for _ in range(columns)] for _ in range(rows)]
    cells[0][0] = cells[-1][-1] = "."
    return f"{rows} {columns}\n" + "".join("".join(row) + "\n" for row in cells)


def _neighbours(grid: list[str], at: tuple[int, int], moves: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    reached = [(at[0] + down, at[1] + right) for down, right in moves]
    return [(r, c) for r, c in reached if 0 <= r < len(grid) and 0 <= c < len(grid[0]) and grid[r][c] == "."]


STRAIGHT, DIAGONAL = ((0, 1), (1, 0), (0, -1), (-1, 0)), ((1, 1), (1, -1), (-1, 1), (-1, -1))
KNIGHT = tuple((a, b) for a, b in itertools.product((-2, -1, 1, 2), repeat=2) if abs(a) != abs(b))
MOVES = {
    "straight": ("to the next cell up, down, left or right", STRAIGHT),
    "king": ("to one of the eight cells around", STRAIGHT + DIAGONAL),
    "bishop": ("to one of the four cells that touch it at a corner", DIAGONAL),
    "knight": ("as a knight in chess does", KNIGHT),
}


def _fewest_moves(grid: list[str], moves: Sequence[tuple[int, int]]) -> int:
    far, queue = {(0, 0): 0}, deque([(0, 0)])
    while queue:
        at = queue.popleft()
        for to in _neighbours(grid, at, moves):
            if to not in far:
                far[to] = far[at] + 1
                queue.append(to)
    return far.get((len(grid) - 1, len(grid[0]) - 1), -1)


def _reachable(grid: list[str], moves: Sequence[tuple[int, int]]) -> int:
    seen, stack = {(0, 0)}, [(0, 0)]
    while stack:
        new = set(_neighbours(grid, stack.pop(), moves)) - seen
        seen |= new
        stack += new
    return len(seen)


def _paths(rng: random.Random) -> Problem:
    move, counts = rng.choice(sorted(MOVES)), rng.random() < 0.4
    solver = _reachable if counts else _fewest_moves
    asked = ("how many free cells you can reach from the upper left one, itself included" if counts else
             "the smallest number of moves from the upper left cell to the lower right one, or -1")  # fmt: skip
    text = ("The first line of the input has two whole numbers, rows and columns of a grid. Then the rows follow, `.` "
            f"for a free cell and `#` for a wall. A move goes from a free cell {MOVES[move][0]}, if that is free. "
            f"Print {asked}.")  # fmt: skip
    name = f"grid-{move}-{'reach' if counts else 'moves'}"
    return Problem(name, name, text, lambda s: str(solver(s.split()[2:], MOVES[move][1])), _grid)


def _subsequence(rng: random.Random) -> Problem:
    kinds: dict[str, tuple[str, Callable[[int, int], bool]]] = {
        "rising": ("each number is greater than the one before", lambda a, b: a < b),
        "level": ("no number is less than the one before", lambda a, b: a <= b),
        "falling": ("each number is less than the one before", lambda a, b: a > b),
        "parity": ("of two neighbours one is even and one is odd", lambda a, b: (a + b) % 2 == 1),
        "divides": ("each number is the one before it plus a multiple of three", lambda a, b: (b - a) % 3 == 0),
    }
    kind = rng.choice(sorted(kinds))
    together = rng.random() < 0.4
    fits = kinds[kind][1]

    def solve(text: str) -> str:
        values, best = _list(text), Numbers()
        for n, value in enumerate(values):
            before = range(max(0, n - 1), n) if together else range(n)
            best.append(1 + max((best[m] for m in before if fits(values[m], value)), default=0))
        return str(max(best))

    what = "stretch of neighbours" if together else "choice of numbers, left in their order,"
    text = f"{LIST_INPUT} Print how many numbers the longest {what} has in which {kinds[kind][0]}."
    name = f"longest-{kind}-{'stretch' if together else 'choice'}"
    return Problem(name, name, text, solve, _numbers)


def _machine(rng: random.Random) -> Problem:
    k = rng.choice((97, 100, 1000, 1009))

    def solve(text: str) -> str:
        stack = Numbers()
        for word in text.split():
            if word in ("add", "sub", "mul"):
                right, left = stack.pop(), stack.pop()
                stack.append({"add": left + right, "sub": left - right, "mul": left * right}[word] % k)
            elif word == "dup":
                stack.append(stack[-1])
            else:
                stack.append(int(word) % k)
        return " ".join(map(str, stack))

    text = ("The input is one line of words for a stack that is empty at first. A number puts its remainder modulo "
            f"{k} on top. `add`, `sub` and `mul` take the top b and then the top a away, and put a + b, a - b or a * b "
            f"on top, modulo {k} (from 0 to {k - 1}). `dup` puts the top there once more. Print the stack at the end, "
            "from bottom to top, separated by spaces.")  # fmt: skip
    return Problem(f"stack-{k}", f"stack-{k}", text, solve, _stack_words)


def _stack_words(rng: random.Random, size: int) -> str:
    words, depth = [str(rng.randint(0, 9))], 1
    for _ in range(2 + 3 * size):
        word = rng.choice(["dup", str(rng.randint(0, 99))] if depth < 2 else ["add", "sub", "mul", "dup", "7", "31"])
        depth += -1 if word in ("add", "sub", "mul") else 1
        words.append(word)
    return " ".join(words) + "\n"


def _base(rng: random.Random) -> Problem:
    base, kind = rng.randint(2, 9), rng.choice(("digits", "ones", "reversed"))

    def solve(text: str) -> str:
        number, digits = int(text), ""
        while number or not digits:
            number, digit = divmod(number, base)
            digits = f"{digit}{digits}"
        return {"digits": digits, "ones": str(sum(map(int, digits))), "reversed": str(int(digits[::-1], base))}[kind]

    asked = {"digits": f"it in base {base}", "ones": f"the sum of its digits in base {base}, in decimal",
             "reversed": f"in decimal the number that has its digits in base {base} in reverse"}  # fmt: skip
    text = f"The input is a whole number from 0 to 1000000, in decimal. Print {asked[kind]}."
    name = f"base-{base}-{kind}"
    return Problem(name, name, text, solve, _number)


def _number(rng: random.Random, size: int) -> str:
    return f"{rng.randint(0, 10 ** min(size + 1, 6))}\n"


def _circle(rng: random.Random) -> Problem:
    k, last = rng.randint(2, 9), rng.random() < 0.5

    def solve(text: str) -> str:
        left, out = deque(range(1, int(text) + 1)), Numbers()
        while left:
            left.rotate(1 - k)
            out.append(left.popleft())
        return str(out[-1]) if last else " ".join(map(str, out))

    asked = "who is the last to leave" if last else "the order in which they leave, separated by spaces"
    which = {2: "2nd", 3: "3rd"}.get(k, f"{k}th")
    text = (f"The input is a whole number n from 1 to 60. The numbers 1 to n stand in a circle. Starting to count at "
            f"1, every {which} of those who are left leaves, and the count goes on after it, until all have left. "
            f"Print {asked}.")  # fmt: skip
    name = f"circle-{k}-{'last' if last else 'order'}"
    return Problem(name, name, text, solve, _people)


def _people(rng: random.Random, size: int) -> str:
    return f"{rng.randint(1, 6 + 6 * min(size, 9))}\n"


# A family with more shapes comes up more often.
FAMILIES: dict[int, tuple[Callable[[random.Random], Problem], ...]] = {
    1: (_pipeline(1, 1),),
    2: (*[_pipeline(2, 3)] * 4, _caesar, _letters, *[_turned] * 2),
    3: (*[_coins] * 6, *[_base] * 2, *[_circle] * 2, _paths, _subsequence, _machine, *[_pipeline(4, 4)] * 4),
}
