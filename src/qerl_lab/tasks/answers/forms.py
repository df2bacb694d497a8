"""The forms of an answer: one quantity, several, a point, an interval, a set, a matrix, an equation, words.

The form decides what equality means, so it is parsed first: order counts in a point but not in a set, and every part of
a list must match.
"""

from dataclasses import dataclass, field

from qerl_lab.tasks.answers.expression import Node


@dataclass(frozen=True)
class Amount:
    """An expression `node`, with a unit or a percent sign if the answer has one.

    `letters` is the whole text read as an expression in which the letters of the unit are variables, if that is
    possible: `2 m` is 2 meters, or 2 times m.
    """

    node: Node
    unit: str = ""
    percent: bool = False
    letters: Node | None = None


@dataclass(frozen=True)
class Words:
    """An answer in words, normalized. Three letters alone may also be a product (`xyz`); then `product` holds it."""

    text: str
    product: Node | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Several:
    """An answer of several parts.

    `kind` says what the parts form, mostly by the brackets around them:

    - "()", "(]", "[)": a point or an interval; "[]": also a matrix, or a row of a matrix
    - "{}": a set; "": a list; "or": a union; "minus": a difference of sets
    - "base 8": the digits of a numeral in base 8
    - ":": a ratio or a time of day; "am" and "pm": a time in that half of the day
    """

    kind: str
    parts: tuple["Form", ...]


@dataclass(frozen=True)
class Named:
    """A named value, `x = 5`: the name and the value."""

    name: str
    form: "Form"


@dataclass(frozen=True)
class Relation:
    """An equation or inequality such as `a < b <= c`: its `sides`, and the `signs` between them."""

    sides: tuple[Node, ...]
    signs: tuple[str, ...]


Form = Amount | Words | Several | Named | Relation
