"""The forms of an answer: one quantity, several, a point, an interval, a set, a matrix, an equation, words.

The form decides what equality means, so it is parsed first: order counts in a point but not in a set, and every part of
a list must match.
"""

from dataclasses import dataclass, field

from qerl_lab.tasks.answers.expression import Node


@dataclass(frozen=True)
class Amount:
    """An expression with unit or percent. `letters` is all of it read as an expression: `2 m` is 2m or 2 meters."""

    node: Node
    unit: str = ""
    percent: bool = False
    scale: int = 1
    letters: Node | None = None


@dataclass(frozen=True)
class Words:
    """Normalized text; three letters alone may also be a product: `xyz`."""

    text: str
    product: Node | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Several:
    """Parts in brackets.

    `brackets` is "()", "[)" and so on for a point or interval, "[]" for a matrix of rows "[]", "{}" for a set, "" for a
    list, "or" for a union, "minus" for a difference, "base 8" for the digits of a numeral,
    ":" for a ratio or a time of day, "am" and "pm" for a time with its half of the day.
    """

    brackets: str
    parts: tuple["Form", ...]


@dataclass(frozen=True)
class Named:
    """A named value, `x = 5`: the name and the value."""

    name: str
    form: "Form"


@dataclass(frozen=True)
class Relation:
    """`a < b <= c`: one sign fewer than sides. In `crossed` the `x` of `12 x 5 = 60` is read as a product sign."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]
    crossed: tuple[Node, ...] | None = field(default=None, compare=False)


Form = Amount | Words | Several | Named | Relation
