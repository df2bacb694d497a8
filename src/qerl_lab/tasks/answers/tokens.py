"""Split an expression, typed or in LaTeX, into tokens: numbers, letters, names of functions, signs."""

import re
from dataclasses import dataclass


class Unreadable(Exception):
    """The text is no expression, or none that the parser knows."""


_FUNCTIONS = """
sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc
arcsinh arccosh arctanh exp cis ln log lg abs floor ceil sqrt
"""
_GREEK = """
alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega
Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega
"""
GREEK_LETTERS = dict(zip("αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΠΣΦΨΩ", _GREEK.split(), strict=True))
FUNCTIONS = frozenset(_FUNCTIONS.split())
GREEK = frozenset(GREEK_LETTERS.values()) | {"Upsilon", "pi", "ell", "hbar", "nabla", "partial", "infty", "imath"}
ALIASES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "arsinh": "arcsinh", "arcosh": "arccosh", "artanh": "arctanh",
    "asinh": "arcsinh", "acosh": "arccosh", "atanh": "arctanh", "cosec": "csc", "tg": "tan", "ctg": "cot",
    "ceiling": "ceil", "inf": "infty", "infinity": "infty", "oo": "infty",
}  # fmt: skip
_NO_PRODUCTS = ("not", "no", "nor", "or", "and", "but", "for", "the", "all", "any", "non", "out", "per", "one", "two",
                "to", "vs", "if")  # fmt: skip
_TOKEN = re.compile(
    r"(?P<repeating>\d*\.\d*\\overline\s*\{\d+\})"
    r"|(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?)"
    r"|\\text\s*\{(?P<text>[^{}]*)\}"
    r"|\\(?P<macro>[A-Za-z]+|[{}])|(?P<word>[A-Za-z]+)|(?P<sign>\*\*|[-+*/^_!|()\[\]{}'])|(?P<space>\s+)",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of an expression: a number, a letter, a macro, a sign or the content of `\\text{}`."""

    kind: str  # a group of _TOKEN such as "number", or "letter"
    text: str
    spaced: bool  # whether a space stands before the token


def tokens_of(text: str) -> list[Token]:
    """Split the whole text of an expression into tokens.

    A typed word is a function, a Greek letter, or a product of up to three letters. Raises Unreadable for another word,
    and for an unknown sign.
    """
    tokens, at, spaced = list[Token](), 0, False
    while at < len(text):
        if (found := _TOKEN.match(text, at)) is None:
            raise Unreadable(text)
        at, kind = found.end(), str(found.lastgroup)
        piece = found[kind]
        known = ALIASES.get(piece.lower(), piece if piece in GREEK else piece.lower())
        if kind == "macro":
            tokens.append(Token("macro", rf"\{piece}" if piece in "{}" else ALIASES.get(piece, piece), spaced))
        elif kind == "word" and (known in FUNCTIONS or known in GREEK):
            tokens.append(Token("macro", known, spaced))
        elif kind == "word":
            if len(piece) > 3 or piece.lower() in _NO_PRODUCTS:
                raise Unreadable(piece)
            tokens += [Token("letter", letter, spaced and not n) for n, letter in enumerate(piece)]
        elif kind != "space":
            tokens.append(Token(kind, piece, spaced))
        spaced = kind == "space"
    return tokens
