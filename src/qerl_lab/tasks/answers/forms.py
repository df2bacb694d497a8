"""The form of an answer: one quantity, several, a point, an interval, a set, a matrix, an equation, words.

The form is read first, because it decides what equality means: the order counts in a point and not in a set, and no
part of a list may be overlooked.
"""

from dataclasses import dataclass, field

from qerl_lab.tasks.answers.expression import Node


@dataclass(frozen=True)
class Amount:
    """An expression and what stands around it; `letters` is all of it as an expression: `2 m` is 2m or 2 meters."""

    node: Node
    unit: str = ""
    percent: bool = False
    scale: int = 1
    letters: Node | None = None


@dataclass(frozen=True)
class Words:
    """Text in one spelling; three letters alone are a product too: `xyz`."""

    text: str
    product: Node | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Numeral:
    """A number in a base that is named: 52_8."""

    digits: str
    base: int


@dataclass(frozen=True)
class Clock:
    """Numbers between colons, a time of day or a ratio; `half` is "am", "pm" or ""."""

    parts: tuple[Node, ...]
    half: str


@dataclass(frozen=True)
class Several:
    """Parts in brackets: a point or interval "()", "[)"; a set "{}"; a list ""; a union "or"; a difference "minus"."""

    brackets: str
    parts: tuple["Form", ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple["Form", ...], ...]


@dataclass(frozen=True)
class Named:
    """`x = 5`: what has a name, and the name."""

    name: str
    form: "Form"


@dataclass(frozen=True)
class Relation:
    """`a < b <= c`: one sign fewer than sides; in `crossed` the sides of `12 x 5 = 60` have a sign for their `x`."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]
    crossed: tuple[Node, ...] | None = field(default=None, compare=False)


Form = Amount | Words | Numeral | Clock | Several | Matrix | Named | Relation
