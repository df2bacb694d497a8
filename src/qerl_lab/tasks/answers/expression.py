r"""Parse mathematical expressions, in LaTeX (`\frac{3\sqrt{3}}{4}`) or typed (`3*sqrt(3)/4`), into trees.

A parser by recursive descent, with a method for each rule. It raises Unreadable for anything unknown, so that nothing
is overlooked.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from qerl_lab.tasks.answers.tokens import FUNCTIONS, GREEK, Token, Unreadable, tokens_of

MAX_DEPTH, MAX_EXPONENT = 40, 4000  # nested brackets and arguments; power of ten in scientific notation


@dataclass(frozen=True, slots=True)
class Num:
    """An exact number.

    For a decimal, `digits` counts the digits without leading zeros, and `places` counts the decimal places. Both are 0
    for an integer and for a repeating decimal. An exponent counts in `places`: 1.5e-3 has 4.
    """

    value: Fraction
    digits: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    r"""A variable or constant, by name: "x", "x_1", "e", "infty", or with a backslash as in `\pi`."""

    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operation or a known function `name`, applied to `args`; `value.py` computes it.

    `+` and `*` take any number of arguments, so that a long sum is no deep tree. `pm` and `mp` take the one behind the
    sign. `call` takes an unknown function and its argument.
    """

    name: str
    args: tuple["Node", ...]


Node = Num | Sym | Op
CONSTANTS = (r"\pi", "e", "infty", "i", r"\imath")

_OVER_A_LETTER = """
hat bar vec dot ddot tilde overline widehat widetilde overrightarrow underline mathbb mathcal mathfrak mathscr
"""
_ACCENTS = frozenset(_OVER_A_LETTER.split())
_NO_ARGUMENT = (*FUNCTIONS - {"sqrt"}, "(", "[")  # end the argument of a function without brackets
_BEFORE_NUMBER = ("!", ")", "pi")  # a number behind one of these, or behind a letter, is a factor
_TIMES, _OVER = ("cdot", "times", "*", "ast"), ("/", "div")
END = Token("end", "", False)
_PAIRS = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "|": "|", r"\{": r"\}"}


def read_expression(text: str) -> Node:
    """Parse the whole text, LaTeX or typed, into a tree. Raises Unreadable if any part of it is unknown."""
    reader = _Reader(tokens_of(text))
    node = reader.sum()
    if reader.next is not END:
        raise Unreadable(text)
    return node


def names(node: Node) -> frozenset[str]:
    """Return the variables of an expression, and the names of its unknown functions; constants such as pi are none."""
    if isinstance(node, Sym):
        return frozenset() if node.name in CONSTANTS else frozenset([node.name])
    return frozenset() if isinstance(node, Num) else frozenset().union(*map(names, node.args))


def read_number(text: str) -> Num:
    """Parse a number such as "1,234.5e-3" exactly. Raises Unreadable for an exponent over MAX_EXPONENT."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unreadable(text)
    whole, _, decimals = mantissa.partition(".")
    digits = len((whole + decimals).lstrip("0")) if decimals else 0
    value = Fraction(int(whole + decimals or 0)) * Fraction(10) ** (int(exponent or 0) - len(decimals))
    return Num(value, digits, max(0, len(decimals) - int(exponent or 0)) if decimals else 0)


class _Reader:
    """Parse tokens into a tree. Each method for a rule parses from the next token on, and steps past what it parsed.

    These methods raise Unreadable if the tokens do not follow the rule.
    """

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = [*tokens, END], 0, 0
        self.bars = 0  # open absolute values
        pairs = list(pairwise(self.tokens))
        # `power` uses these two to tell a factor, as in n(n+1), from a function, as in f(2x).
        self.alone = {token.text for token, after in pairs if after.text not in ("(", "[", "^", "_", "'")}
        self.before_bracket = [token.text for token, after in pairs if after.text in ("(", "[")]
        self.raised_at = -1  # index where the last exponent ended

    @property
    def next(self) -> Token:
        """Return the next token, END behind the last one, without stepping past it."""
        return self.tokens[self.at]

    def sees(self, *texts: str) -> bool:
        """Tell whether the next token is a sign or macro with one of these texts, without stepping past it."""
        return self.next.kind in ("sign", "macro") and self.next.text in texts

    def take(self) -> Token:
        """Return the next token and step past it. Raises Unreadable at the end."""
        if self.next is END:
            raise Unreadable("the end")
        self.at += 1
        return self.tokens[self.at - 1]

    def deeper(self) -> None:
        """Count one more level of nesting; the caller must subtract it from `depth` again.

        Raises Unreadable beyond MAX_DEPTH levels.
        """
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    def sum(self) -> Node:
        r"""Parse `sum = term (("+" | "-" | "\pm") term)*` from the next token on, in which a - b is a + neg(b)."""
        terms = list[Node]([] if self.sees("pm", "mp") else [self.term()])
        while self.sees("+", "-", "pm", "mp"):
            sign = self.take().text
            term = self.term()
            if sign == "-":
                term = Op("neg", (term,))
            elif sign != "+":
                term = Op(sign, (term,))
            terms.append(term)
        return terms[0] if len(terms) == 1 else Op("+", tuple(terms))

    def term(self) -> Node:
        """Parse `term = factor (("*" | "/" | "") factor)*`.

        Implicit multiplication, as in `xy`, binds as tightly as `*`, but its second factor has no sign.
        """
        factors = [self.factor()]
        while True:
            if self.sees(*_TIMES):
                self.take()
                factors.append(self.factor())
            elif self.sees(*_OVER):
                self.take()
                factors.append(Op("inverse", (self.factor(),)))
            elif self.begins_factor():
                factors.append(self.power())
            else:
                return factors[0] if len(factors) == 1 else Op("*", tuple(factors))

    def begins_factor(self) -> bool:
        """Tell whether the next token begins a factor that is multiplied without a sign, such as `y` in `xy`.

        A number does so only behind a letter, `!`, `)` or pi, and behind an exponent that surely ends before the
        number, as in `2^{6}3` and `2^6 3^5`. So `2 3` and `{2}{3}` are no products.
        """
        token = self.next
        if token.kind in ("number", "repeating"):
            before = self.tokens[self.at - 1]
            is_raised = token.spaced and self.tokens[self.at + 1].text == "^"
            after_exponent = self.raised_at == self.at and (before.text == "}" or is_raised)  # 2^6 3^5
            return before.kind == "letter" or before.text in _BEFORE_NUMBER or after_exponent
        if token.text == "{" and self.tokens[self.at + 1].kind == "number":  # TeX prints {5}{6} as 56
            return self.tokens[self.at - 1].kind != "number" and self.tokens[self.at - 1].text != "}"
        if token.kind == "sign":
            return token.text in "([{" or (token.text == "|" and not self.bars)
        if token.kind == "macro":
            return token.text not in ("pm", "mp", "rfloor", "rceil", r"\}", "row", "div", *_TIMES)
        return token is not END

    def factor(self) -> Node:
        """Parse `factor = ("-" | "+")* power`."""
        negative = False
        while self.sees("-", "+"):
            negative ^= self.take().text == "-"
        node = self.power()
        return Op("neg", (node,)) if negative else node

    def power(self) -> Node:
        """Parse `power = raised | letter ("^" factor)? "(" sum ")" ("^" factor)?`.

        A letter before brackets is a factor, as in `n(n+1)`, if it also stands in the text without brackets, exponent,
        subscript or prime behind it. It is a factor too if it is not f or g, has brackets behind it only once, and
        these contain a sum. Otherwise it is a function, as in `f(2x)`.
        """
        node = self.raised(self.atom())
        if not (self.sees("(", "[") and _letter(node)):
            return node
        name, inside = _letter(node).removeprefix("\\"), self.group(self.take().text)
        is_function = name in ("f", "g") or self.before_bracket.count(name) > 1
        if name in self.alone or (_has_sum(inside) and not is_function):
            return Op("*", (node, self.raised(inside)))
        return self.raised(Op("call", (node, inside)))

    def raised(self, node: Node) -> Node:
        """Parse the rest of `raised = postfix ("^" factor)?` behind `node`, its first atom; return both as one node."""
        node = self.postfix(node)
        if self.sees("^", "**"):
            self.take()
            exponent = self.argument(signed=True)
            self.raised_at = self.at
            node = self.postfix(Op("^", (node, exponent)))
        return node

    def postfix(self, node: Node) -> Node:
        r"""Parse the rest of `postfix = atom ("!" | "^\circ")*` behind `node`, the atom; return both as one node."""
        for _ in range(MAX_DEPTH):
            if self.sees("!"):
                self.take()
                node = Op("factorial", (node,))
            elif self.sees("^") and self.tokens[self.at + 1].text == "circ":
                self.at += 2
                node = Op("degrees", (node,))
            else:
                return node
        raise Unreadable("too deep")

    def argument(self, signed: bool = False) -> Node:
        r"""Parse the argument of a macro: a group, or one character: `\frac12` is 1/2, in two calls.

        With `signed` it parses an exponent instead, which may have a sign and many digits: `2^-10`.
        """
        token = self.next
        if token.kind == "number":
            if signed or len(token.text) == 1:
                return read_number(self.take().text)
            if not token.text.isdigit():
                raise Unreadable(token.text)
            self.tokens[self.at] = Token("number", token.text[1:], False)
            return read_number(token.text[0])
        self.deeper()
        node = self.factor() if signed and self.sees("-", "+") else self.atom()
        self.depth -= 1
        return node

    def group(self, opening: str) -> Node:
        """Parse a sum and the closing bracket. The caller has already taken the opening bracket, `opening`."""
        self.deeper()
        node = self.sum()
        self.depth -= 1
        if not self.sees(_PAIRS[opening]):
            raise Unreadable(f"no {_PAIRS[opening]}")
        self.at += 1
        return node

    def atom(self) -> Node:
        """Parse a number, a variable, an absolute value, a sum in brackets, or a macro with its arguments."""
        token = self.take()
        if token.kind == "number":
            return self.mixed(token)
        if token.kind == "repeating":
            whole, fixed, period = re.findall(r"(\d*)\.(\d*)\D+(\d+)", token.text)[0]  # 0.1\overline{6} is 1/6
            nines = Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(fixed))
            return Num(Fraction(int(whole + fixed or 0), 10 ** len(fixed)) + nines)
        if token.kind == "letter":
            return self.symbol(token.text)
        if token.kind == "text":
            return self.symbol(f"text {token.text.strip()}")
        if token.kind == "sign":
            if token.text == "|":
                self.bars += 1
                node = self.group("|")
                self.bars -= 1
                return Op("abs", (node,))
            if token.text not in "([{":
                raise Unreadable(token.text)
            return self.group(token.text)
        return self.macro(token.text)

    def mixed(self, token: Token) -> Node:
        r"""Return the number in `token`, plus a proper fraction of integers behind it: `1\frac{4}{5}`, `1 4/5`."""
        number = read_number(token.text)
        if not token.text.isdigit():
            return number
        tokens, start = list(self.tokens), self.at
        next_three = tokens[start : start + 3]
        if self.sees("frac"):
            self.take()
            parts = [self.argument(), self.argument()]
        elif [each.kind for each in next_three] == ["number", "sign", "number"] and next_three[1].text == "/":
            self.at += 3
            parts = [read_number(next_three[0].text), read_number(next_three[2].text)]
        else:
            return number
        integers = [part.value for part in parts if isinstance(part, Num) and not part.digits]
        if len(integers) == 2 and integers[0] < integers[1]:
            return Num(number.value + integers[0] / integers[1])
        self.tokens, self.at = tokens, start  # the fraction is a factor, if anything
        return number

    def symbol(self, name: str) -> Node:
        """Return the variable `name` with the primes and the subscript behind it: `x'`, `x_{12}`, `x1` (as x_1)."""
        while self.sees("'"):
            name += self.take().text
        is_number = self.next.kind == "number" and not self.next.spaced
        if is_number and len(name) == 1 and name not in "ie":
            return Sym(f"{name}_{self.take().text}")  # x1, as typed
        if self.sees("_"):
            self.take()
            name += "_" + self.subscript()
        while self.sees("'"):
            name += self.take().text
        return Sym(name)

    def subscript(self) -> str:
        """Take a subscript, one token or a group in braces, and return its text without these braces."""
        token = self.take()
        if token.text != "{":
            return token.text.strip()
        parts, depth = list[str](), 1
        while True:
            token = self.take()
            depth += (token.text == "{") - (token.text == "}")
            if not depth:
                return "".join(part.strip() for part in parts)
            parts.append(token.text)

    def macro(self, name: str) -> Node:
        """Parse the arguments of the macro `name` (without backslash) into its node. Raises Unreadable if unknown."""
        if name == "frac":
            return Op("/", (self.argument(), self.argument()))
        if name == "sqrt":
            return self.root()
        if name == "binom":
            return Op("binom", (self.argument(), self.argument()))
        if name in ("lfloor", "lceil"):
            return Op("floor" if name == "lfloor" else "ceil", (self.group(name),))
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.symbol("infty" if name == "infty" else rf"\{name}")
        if name in _ACCENTS:
            return self.symbol(f"{name} {self.subscript()}")
        raise Unreadable(name)

    def root(self) -> Node:
        r"""Parse a root behind `\sqrt`: the degree in brackets, 2 if there is none, and the radicand."""
        degree: Node = Num(Fraction(2))
        if self.sees("["):
            self.take()
            degree = self.group("[")
        if self.next.kind == "number":  # TeX would take one digit, but √12 means the root of twelve
            return Op("root", (read_number(self.take().text), degree))
        return Op("root", (self.argument(), degree))

    def function(self, name: str) -> Node:
        r"""Parse what follows the known function `name`: `\log_2 8`, `\sin^2 x`, `\sin^{-1} x` (arcsin), `sin(x)`.

        Its argument is a group, or a product up to the next function, as in `\sin 2x \cos x`.
        """
        base: Node | None = None
        exponent: Node | None = None
        while self.sees("_", "^"):
            if self.take().text == "_":
                base = self.argument()
            else:
                exponent = self.argument(signed=True)
        if base is not None and name != "log":
            raise Unreadable(name)
        if self.sees("(", "[", "{"):
            argument = self.postfix(self.group(self.take().text))
        else:
            self.deeper()
            negative = self.sees("-")
            if negative:
                self.take()
            factors = [self.raised(self.atom())]
            while self.begins_factor() and not self.sees(*_NO_ARGUMENT):
                factors.append(self.raised(self.atom()))
            self.depth -= 1
            product = Op("*", tuple(factors))
            argument = Op("neg", (product,)) if negative else product
        if exponent == Op("neg", (Num(Fraction(1)),)):
            if "arc" + name not in FUNCTIONS:
                raise Unreadable(name)
            return Op("arc" + name, (argument,))
        node = Op(name, (argument,) if base is None else (argument, base))
        return node if exponent is None else Op("^", (node, exponent))


def _letter(node: Node) -> str:
    """Return the name of a variable, also of one with an exponent as in `f^{-1}`; "" for constants and other nodes."""
    node = node.args[0] if isinstance(node, Op) and node.name == "^" else node
    return node.name if isinstance(node, Sym) and node.name not in CONSTANTS else ""


def _has_sum(node: Node) -> bool:
    """Tell whether an expression contains a sum, at any depth."""
    return isinstance(node, Op) and (node.name == "+" or any(map(_has_sum, node.args)))
