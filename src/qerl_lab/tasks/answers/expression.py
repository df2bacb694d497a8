r"""Parse mathematical expressions, in LaTeX (`\frac{3\sqrt{3}}{4}`) or typed (`3*sqrt(3)/4`), into trees.

Raises Unreadable for anything unknown instead of skipping it, so that no part of an answer is overlooked. Recursive
descent with bounded depth and length:

    sum      = term (("+" | "-" | "\pm") term)*
    term     = factor (("*" | "/" | "") factor)*      a product without a sign binds as one with a sign
    factor   = ("-" | "+") factor | power
    power    = raised | letter ("^" factor)? "(" sum ")" ("^" factor)?      a product or a call: see `is_factor`
    raised   = postfix ("^" factor)?
    postfix  = atom ("!" | "^\circ")*
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from qerl_lab.tasks.answers.tokens import FUNCTIONS, GREEK, Token, Unreadable, tokens_of

MAX_DEPTH, MAX_EXPONENT = 40, 4000  # nested brackets and arguments; power of ten in scientific notation


@dataclass(frozen=True, slots=True)
class Num:
    """A number as written: `digits` without leading zeros, `places` after the decimal point, 0 for an integer."""

    value: Fraction
    digits: int = 0
    places: int = 0


@dataclass(frozen=True, slots=True)
class Sym:
    name: str


@dataclass(frozen=True, slots=True)
class Op:
    """An operation. `+` and `*` take any number of arguments, so that a long sum is no deep tree.

    `pm` and `neg` take one. The others are "- / ^ inverse root log binom", the functions, and `call`: an unknown
    function's name with its argument.
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
_BEFORE_NUMBER = ("!", ")", "pi")  # as letters: they cannot be digits of the number after them
_TIMES, _OVER = ("cdot", "times", "*", "ast"), ("/", "div")
_PAIRS = {"(": ")", "[": "]", "{": "}", "lfloor": "rfloor", "lceil": "rceil", "|": "|", r"\{": r"\}"}


def read_expression(text: str) -> Node:
    """Parse the whole text as an expression. Raises Unreadable."""
    reader = _Reader(tokens_of(text))
    node = reader.sum()
    if reader.next is not None:
        raise Unreadable(text)
    return node


def names(node: Node) -> frozenset[str]:
    """Return the variables of an expression, and the names of the functions it calls."""
    if isinstance(node, Sym):
        return frozenset() if node.name in CONSTANTS else frozenset([node.name])
    return frozenset() if isinstance(node, Num) else frozenset().union(*map(names, node.args))


def read_number(text: str) -> Num:
    """Parse a decimal number with thousands separators and exponent. Raises Unreadable for a huge exponent."""
    mantissa, _, exponent = text.replace(",", "").lower().partition("e")
    if abs(int(exponent or 0)) > MAX_EXPONENT:
        raise Unreadable(text)
    whole, _, decimals = mantissa.partition(".")
    digits = len((whole + decimals).lstrip("0")) if decimals else 0
    value = Fraction(int(whole + decimals or 0)) * Fraction(10) ** (int(exponent or 0) - len(decimals))
    return Num(value, digits, max(0, len(decimals) - int(exponent or 0)) if decimals else 0)


def _repeating(text: str) -> Num:
    whole, _, rest = text.partition(".")
    fixed, period = re.findall(r"\d*(?=\\)|\d+(?=\})", rest)[0], re.findall(r"\{(\d+)\}", rest)[0]
    nines = (10 ** len(period) - 1) * 10 ** len(fixed)
    return Num(Fraction(int(whole + fixed or 0), 10 ** len(fixed)) + Fraction(int(period), nines))


class _Reader:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.bars = 0  # open absolute values
        pairs = list(pairwise([*tokens, Token("end", "", False)]))
        self.alone = {token.text for token, after in pairs if after.text not in ("(", "[", "^", "_", "'")}
        self.before_bracket = [token.text for token, after in pairs if after.text in ("(", "[")]
        self.raised_at = -1  # index where the last exponent ended
        self.bare_at = -1  # index where the last argument without brackets ended in a letter

    @property
    def next(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def sees(self, *texts: str) -> bool:
        """Tell whether the next token is one of these signs or macros."""
        token = self.next
        return token is not None and token.kind in ("sign", "macro") and token.text in texts

    def take(self) -> Token:
        if self.next is None:
            raise Unreadable("the end")
        self.at += 1
        return self.tokens[self.at - 1]

    def expect(self, text: str) -> None:
        if not self.sees(text):
            raise Unreadable(f"no {text}")
        self.at += 1

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("too deep")

    def sum(self) -> Node:
        self.deeper()
        terms = list[Node]([] if self.sees("pm", "mp") else [self.term()])
        while self.sees("+", "-", "pm", "mp"):
            sign = self.take().text
            term = self.term()
            terms.append(term if sign == "+" else Op("neg" if sign == "-" else sign, (term,)))
        self.depth -= 1
        return terms[0] if len(terms) == 1 else Op("+", tuple(terms))

    def term(self) -> Node:
        factors = [self.factor()]
        while True:
            if self.sees(*_TIMES):
                self.take()
                factors.append(self.factor())
            elif self.sees(*_OVER):
                self.take()
                factors.append(Op("inverse", (self.factor(),)))
            elif self.begins_factor():
                after_bare = self.at == self.bare_at and self.sees("(", "[")
                factors.append(self.power())
                if after_bare and not _has_sum(factors[-1]):
                    raise Unreadable(r"\sin x(0)")  # ambiguous: sin of x(0), or a product
            else:
                return factors[0] if len(factors) == 1 else Op("*", tuple(factors))

    def begins_factor(self) -> bool:
        """Tell whether the next token can be multiplied without a sign. Two numbers in a row are no product."""
        token = self.next
        if token is None:
            return False
        if token.kind in ("number", "repeating"):
            before = self.tokens[self.at - 1]
            is_raised = token.spaced and [ahead.text for ahead in self.tokens[self.at + 1 : self.at + 2]] == ["^"]
            after_exponent = self.raised_at == self.at and (before.text == "}" or is_raised)  # 2^6 3^5
            return before.kind == "letter" or before.text in _BEFORE_NUMBER or after_exponent
        if token.kind == "sign":
            return token.text in "([{" or (token.text == "|" and not self.bars)
        return token.kind != "macro" or token.text not in ("pm", "mp", "rfloor", "rceil", r"\}", "row", "div", *_TIMES)

    def factor(self) -> Node:
        self.deeper()
        if self.sees("-", "+"):
            negative = self.take().text == "-"
            node = self.factor()
            node = Op("neg", (node,)) if negative else node
        else:
            node = self.power()
        self.depth -= 1
        return node

    def power(self) -> Node:
        node = self.raised(self.atom())
        if not (self.sees("(", "[") and _letter(node)):
            return node
        inside = self.group(self.take().text)
        if self.is_factor(_letter(node), inside):
            return Op("*", (node, self.raised(inside)))
        return self.raised(Op("call", (node, inside)))

    def is_factor(self, letter: str, inside: Node) -> bool:
        """Tell whether a letter before a bracket is a factor, and not the name of a function.

        It is one if the letter also stands alone: `n(n+1)`. Otherwise only a sum needs the brackets: `h(a+b)`, not
        `I(0)` or `f(2x)`. Even before a sum, f and g name functions, and so does a letter before several brackets:
        `T(n-1)+T(n-2)`.
        """
        name = letter.removeprefix("\\")
        is_function = name in ("f", "g") or self.before_bracket.count(name) > 1
        return name in self.alone or (_has_sum(inside) and not is_function)

    def raised(self, node: Node) -> Node:
        """Apply the factorials, degrees and exponent that follow to the node."""
        node = self.postfix(node)
        if self.sees("^", "**"):
            self.take()
            exponent = self.argument(signed=True)
            self.raised_at = self.at
            node = self.postfix(Op("^", (node, exponent)))
        return node

    def postfix(self, node: Node) -> Node:
        for _ in range(MAX_DEPTH):
            if self.sees("!"):
                self.take()
                node = Op("factorial", (node,))
            elif self.sees("^") and self.tokens[self.at + 1 : self.at + 2] and self.tokens[self.at + 1].text == "circ":
                self.at += 2
                node = Op("degrees", (node,))
            else:
                return node
        raise Unreadable("too deep")

    def argument(self, signed: bool = False) -> Node:
        r"""Parse a TeX argument: a group, or one character as in `\frac12`. Typed powers may have a sign."""
        if signed and self.sees("-", "+"):
            return self.factor()
        token = self.next
        if token is not None and token.kind == "number":
            return read_number(self.take().text) if signed else self.first_digit()
        self.deeper()
        node = self.atom()
        self.depth -= 1
        return node

    def first_digit(self) -> Node:
        token = self.take()
        if len(token.text) > 1:
            if not token.text.isdigit():
                raise Unreadable(token.text)
            self.at -= 1
            self.tokens[self.at] = Token("number", token.text[1:], False)
        return read_number(token.text[0])

    def group(self, opening: str) -> Node:
        node = self.sum()
        self.expect(_PAIRS[opening])
        return node

    def atom(self) -> Node:
        token = self.take()
        if token.kind == "number":
            return self.mixed(token)
        if token.kind == "repeating":
            return _repeating(token.text)
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
        r"""Parse a number, or a mixed number with a proper fraction of two integers: `1\frac{4}{5}`, `1 4/5`."""
        node, tokens, start = read_number(token.text), list(self.tokens), self.at
        part = self.fraction_behind() if token.text.isdigit() else None
        if part is not None and part < 1:
            return Num(node.value + part)
        self.tokens, self.at = tokens, start
        return node

    def fraction_behind(self) -> Fraction | None:
        """Return the fraction of two integers that follows, if any."""
        if self.sees("frac"):
            self.take()
            over, under = self.argument(), self.argument()
            whole = isinstance(over, Num) and isinstance(under, Num) and not over.digits and not under.digits
            return over.value / under.value if whole and under.value else None  # type: ignore[union-attr]
        ahead = self.tokens[self.at : self.at + 3]
        kinds, texts = [token.kind for token in ahead], [token.text for token in ahead]
        if kinds != ["number", "sign", "number"] or texts[1] != "/" or not ahead[0].spaced:
            return None
        self.at += 3
        whole = texts[0].isdigit() and texts[2].isdigit() and int(texts[2]) > 0
        return Fraction(int(texts[0]), int(texts[2])) if whole else None

    def symbol(self, name: str) -> Node:
        while self.sees("'"):
            name += self.take().text
        token = self.next
        if token is not None and token.kind == "number" and not token.spaced and len(name) == 1 and name not in "ie":
            return Sym(f"{name}_{self.take().text}")  # x1, as typed
        if self.sees("_"):
            self.take()
            name += "_" + self.subscript()
        while self.sees("'"):
            name += self.take().text
        return Sym(name)

    def subscript(self) -> str:
        """Return the tokens of a subscript as text."""
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
        degree: Node = Num(Fraction(2))
        if self.sees("["):
            self.take()
            degree = self.group("[")
        token = self.next
        if token is not None and token.kind == "number":  # TeX would take one digit, but √12 means the root of twelve
            return Op("root", (read_number(self.take().text), degree))
        return Op("root", (self.argument(), degree))

    def function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        while self.sees("_", "^"):
            if self.take().text == "_":
                base = self.argument()
            else:
                exponent = self.argument(signed=True)
        if base is not None and name != "log":
            raise Unreadable(name)
        argument = self.function_argument()
        if exponent == Op("neg", (Num(Fraction(1)),)):
            if "arc" + name not in FUNCTIONS:
                raise Unreadable(name)
            return Op("arc" + name, (argument,))
        node = Op(name, (argument,) if base is None else (argument, base))
        return node if exponent is None else Op("^", (node, exponent))

    def function_argument(self) -> Node:
        r"""Parse a function's argument: a group, or a product up to the next function, as in `\sin 2x \cos x`."""
        if self.sees("(", "[", "{"):
            self.deeper()
            node = self.postfix(self.group(self.take().text))
            self.depth -= 1
            return node
        self.deeper()
        negative = self.sees("-") and bool(self.take())
        factors = [self.raised(self.atom())]
        while self.begins_factor() and not self.sees(*_NO_ARGUMENT):
            factors.append(self.raised(self.atom()))
        self.bare_at = self.at if _letter(factors[-1]) else -1
        self.depth -= 1
        return Op("neg" if negative else "*", (Op("*", tuple(factors)),) if negative else tuple(factors))


def _letter(node: Node) -> str:
    """Return the letter of a node, also with an exponent as in `f^{-1}`; "" for anything else."""
    node = node.args[0] if isinstance(node, Op) and node.name == "^" else node
    return node.name if isinstance(node, Sym) and node.name not in CONSTANTS else ""


def _has_sum(node: Node) -> bool:
    return isinstance(node, Op) and (node.name == "+" or any(map(_has_sum, node.args)))
