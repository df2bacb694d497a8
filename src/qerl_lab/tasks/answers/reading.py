"""Parse the form of an answer: split at unions, commas and signs, open brackets, parse what is left.

`read` returns None for a text without such a form; the functions below raise Unreadable, unless they say otherwise.
"""

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache

from qerl_lab.tasks.answers.expression import Node, Num, Op, Sym, read_expression
from qerl_lab.tasks.answers.forms import Amount, Form, Named, Relation, Several, Words
from qerl_lab.tasks.answers.quantity import quantity
from qerl_lab.tasks.answers.surface import DOUBTS, compact
from qerl_lab.tasks.answers.tokens import FUNCTIONS, GREEK, Unreadable

MAX_PARTS, MAX_NESTING = 64, 8
_BRACKETS = re.compile(r"\\[{}]|\\[lr]angle(?![A-Za-z])|\\(?:begin|end)\s*\{[a-z]+\*?\}|\\[A-Za-z]+|[()\[\]{}]")
_OPEN, _CLOSE = {"(", "[", "{", r"\{", r"\langle"}, {")", "]", "}", r"\}", r"\rangle"}
_SHAPES = {"(": "(", "[": "[", r"\{": "{", r"\langle": "("}
_ENDS = {")": ")", "]": "]", r"\}": "}", r"\rangle": ")"}
_UNION = re.compile(r"\\cup(?![A-Za-z])|(?<=[)\]])\s*[Uu]\s*(?=[(\[])")  # `[1,2] \cup (3,4]`, `[1,2] U (3,4]`
_MINUS = re.compile(r"\\setminus(?![A-Za-z])|\\backslash(?![A-Za-z])")  # `\mathbb{R} \setminus \{0\}`
_IN = re.compile(r"\\in(?![A-Za-z])")  # `x \in A`
_OR = re.compile(r"(?<![A-Za-z\\])or(?![A-Za-z])")  # `1 or 2`, but not `for` and `\or`
_AND = re.compile(r"(?:[,;]\s*)?(?<![A-Za-z\\])and(?![A-Za-z])|[,;]|\\row(?![A-Za-z])")  # `1, 2; 3, and 4`
_LIST = re.compile(rf"{_AND.pattern}|(?:[,;]\s*)?{_OR.pattern}")
_COMMA, _COLON = re.compile("[,;]"), re.compile(":")
_SIGN = re.compile(r"<=|>=|==|!=|[=<>]|\\(?:le|ge|ne|in|approx|lt|gt)(?![A-Za-z])")
_CROSS = re.compile(r"(?<=[\d)])\s*[xX]\s*(?=[\d(]|\\dollar(?![A-Za-z]))")  # `12 x 5`
_MONEY = re.compile(r"\\dollar(?=\s*[\d.])")  # `\dollar 5`
_SIGNS = {r"\le": "<=", r"\ge": ">=", r"\ne": "!=", "==": "=", r"\lt": "<", r"\gt": ">"}
_THOUSANDS = re.compile(  # no list without blanks, `1,000,2`, and no mixed number, `1 200/300`
    r"(?<![\w.,])\d{1,3}(?:(?:,\d{3})+(?!\d|,\d)|(?: \d{3})+(?![\d,]| *\d| ?/ ?\d))", re.ASCII
)
_NUMERAL = re.compile(  # digits, then the base: `17_8`, `17_{\text{eight}}`, `17 (base 8)`, `17 \text{ in base eight}`
    r"\(?([0-9A-Za-z]*\d[0-9A-Za-z]*)\)?\s*"
    r"(?:_\s*(?:\{\s*\(?(?:\\text\{)?\s*(\w+)\s*\}?\)?\s*\}|(\d))"
    r"|[({ ]*(?:\\text\{)?\s*(?:in )?base[\s}-]*(\w+)[\s})]*)",
    re.ASCII,
)
_CLOCK = re.compile(  # `10:30`, `1:02:03.5`, `10 am`, `10:30 \text{ p.m.}`
    r"(\d{1,6}(?:\s*:\s*\d{1,6}(?:\.\d+)?)*)\s*(?:\\text\{)?\s*(a\.?\s?m\.?|p\.?\s?m\.?)?\s*\}?",
    re.IGNORECASE | re.ASCII,
)
# `\begin{pmatrix} 1 & 2 \row 3 & 4 \end{pmatrix}`, `\begin{array}{cc} 1 & 2 \end{array}`
_MATRIX = re.compile(r"\\begin\{([pbB]?matrix|smallmatrix|array)\}(?:\{[lcr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)
_NO_WORDS = ("or", "and", "inf", "infinity")
_LETTERS = re.compile(r"[A-Za-z][A-Za-z' .-]*")  # `St. John's`, `one-half`
_NUMBER_NAMES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBERS = {name: n for n, name in enumerate(_NUMBER_NAMES.split())}
_REALS = (r"\mathbb{R}", r"\mathbf{R}", "all real numbers", "all reals", "the set of all real numbers")
# the inside of `\{x \mid x < 3\}`, `\{x \in \mathbb{R} : x < 3\}`
_BUILT = re.compile(r"\s*[A-Za-z]\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?:\\mid(?![A-Za-z])|[|:])(.*)")
_SUBSCRIPT = r"(?:_(?:\w|\{[^{}]*\}))?"
_NAME = re.compile(  # a variable or a word; with an argument: f(x), P(X=2), f^{-1}(x); dy/dx, a point, a ratio
    rf"\\?[A-Za-z]+{_SUBSCRIPT}'*(?:\s*(?:\^\s*\{{\s*-1\s*\}}\s*)?'*\(\s*[A-Za-z0-9](?:\s*[,=]\s*[A-Za-z0-9])*\s*\))?"
    r"|\(\s*[A-Za-z](?:\s*,\s*[A-Za-z])+\s*\)|\\frac\s*\{d ?[A-Za-z]\}\s*\{d ?[A-Za-z]\}|\\angle\s*[A-Za-z ]+"
    r"|\\(?:text|overline|vec|overrightarrow|mathbf)\s*\{[A-Za-z ]+\}|\|[A-Z]+\|"
    rf"|[A-Za-z]+{_SUBSCRIPT}(?:\s*:\s*[A-Za-z]+{_SUBSCRIPT})+|\\frac\s*\{{[A-Z]{{2}}\}}\s*\{{[A-Z]{{2}}\}}"
)


@lru_cache(maxsize=4096)
def read(text: str) -> Form | None:
    """Parse an answer, normalized by `surface.plain`, into its form (see forms.py). Return None if it has no form."""
    try:
        return _read(text, nesting=0)
    except (Unreadable, RecursionError):
        return None


def _read(text: str, nesting: int, listed: bool = False) -> Form:
    """Parse the text of an answer, or of a part of it inside `nesting` levels of parts, into its form.

    `listed`: the text is a part in brackets, where `1,800` is two numbers.
    """
    text = text.strip()
    if not text or nesting > MAX_NESTING:
        raise Unreadable(text)
    if simple := _simple(text):
        return simple
    if not listed:
        text = _without_thousands(text)
    depths = _depths(text)
    for pattern, kind in ((_MINUS, "minus"), (_UNION, "or")):
        parts, _ = _split(text, depths, pattern)
        if len(parts) > 1:
            named = _IN.split(parts[0])
            if len(named) == 2:  # x \in A \cup B
                return Named(_name(named[0]), _several(kind, [named[1], *parts[1:]], nesting))
            return _several(kind, parts, nesting)
    parts, _ = _split(text, depths, _LIST)
    if len(parts) > 1:
        found = _several("", parts, nesting)
        if not _OR.search(text):
            return found
        are_sets = all(isinstance(part, Relation) and part.signs[0] not in ("=", "!=") for part in found.parts)
        return Several("or" if are_sets else "{}", found.parts)  # x < 1 or x > 2 is a union; 0 or 1 is no point
    sides, signs = _split(text, depths, _SIGN)
    if signs:
        return _relation(text, sides, signs, nesting)
    parts, colons = _split(text, depths, _COLON)
    if colons:
        return Several(":", tuple(map(Amount, _sides(parts))))
    if inside := _bracketed(text, nesting):
        return inside
    return _amount(text)


def _simple(text: str) -> Form | None:
    """Parse a text that needs no splitting; return None for any other text.

    Such a text is a numeral with a base (`17_8`, `17 base eight`), a time, one letter, a matrix, the real numbers, the
    empty set, or words. Raises Unreadable for a digit that its base lacks, and for matrix rows of unequal length.
    """
    if found := _NUMERAL.fullmatch(text):
        digits, base = found[1], found[2] or found[3] or found[4]
        radix = int(base) if base.isdigit() and len(base) < 3 else _NUMBERS.get(base.lower(), 0)
        if not 2 <= radix <= 36 or any(int(digit, 36) >= radix for digit in digits):
            raise Unreadable(text)
        if radix == 10:
            return Amount(Num(Fraction(int(digits))))
        return Several(f"base {radix}", (Words(digits.lower().lstrip("0") or "0"),))
    if (found := _CLOCK.fullmatch(text)) and (":" in text or found[2]):
        half = "".join(re.findall("[apm]", (found[2] or "").lower()))  # a.m. is am
        clock = f"{found[1]}:0" if ":" not in found[1] else found[1]  # 10 am is 10:00 am
        return Several(half or ":", tuple(Amount(read_expression(part.strip())) for part in clock.split(":")))
    if found := re.fullmatch(r"\(?\s*(?:\\text\{)?\(?\s*([A-Za-z])\s*\)?\}?\s*\)?[.:]?", text):  # (C), \text{(C)}.
        return Amount(Sym(found[1]))
    if found := _MATRIX.fullmatch(text):
        rows = [row.strip() for row in re.split(r"\\row(?![A-Za-z])", found[2].replace(r"\hline", ""))]
        # At the deepest nesting, so that a cell with parts is refused.
        cells = [[_read(cell, MAX_NESTING, listed=True) for cell in row.split("&")] for row in rows if row]
        if not cells or len({len(row) for row in cells}) > 1 or len(cells) * len(cells[0]) > MAX_PARTS:
            raise Unreadable(text)
        return Several("[]", tuple(Several("[]", tuple(row)) for row in cells))
    if text in _REALS:
        return Several("()", (Amount(Op("neg", (Sym("infty"),))), Amount(Sym("infty"))))
    if re.fullmatch(r"\\emptyset|\\\{\s*\\\}", text):
        return Several("{}", ())
    if not (words := _words(text)):
        return None
    if words in _NUMBERS:
        return Amount(Num(Fraction(_NUMBERS[words])))
    return Words(words, _read_or_none(text) if re.fullmatch("[A-Za-z]{3}", text) else None)


def _words(text: str) -> str:
    """Return the words of a text in lower case, without article and punctuation; "" if the text is not words alone.

    The text must have a run of three letters or the word "no", because `xy` is a product. It must not have "and", "or",
    "infinity", or the name of a function or a Greek letter.
    """
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).strip()
    runs = re.findall(r"[A-Za-z]+", text)
    is_text = _LETTERS.fullmatch(text) and any(len(run) > 2 or run.lower() == "no" for run in runs)
    if not is_text or any(run.lower() in FUNCTIONS or run in GREEK or run.lower() in _NO_WORDS for run in runs):
        return ""
    kept = re.findall(r"[a-z0-9]+", text.lower())
    return " ".join(kept[1:] if kept[0] in ("a", "an", "the") and len(kept) > 1 else kept)


def _without_thousands(text: str) -> str:
    """Remove commas and spaces that separate thousands, but not in brackets, where a comma may separate parts."""
    if not _THOUSANDS.search(text):
        return text
    depths = _depths(text)
    return _THOUSANDS.sub(
        lambda found: found[0] if depths[found.start()] else found[0].replace(",", "").replace(" ", ""), text
    )


def _depths(text: str) -> list[int]:
    """Return, for each character of `text`, how many brackets are open there; braces of TeX arguments count too.

    Raises Unreadable if brackets stay open, or if one closes that was not opened.
    """
    depths, depth, last = list[int](), 0, 0
    for found in _BRACKETS.finditer(text):
        depths += [depth] * (found.start() - last)
        opens = found[0] in _OPEN or found[0].startswith(r"\begin")
        closes = found[0] in _CLOSE or found[0].startswith(r"\end")
        depth += opens - closes
        depths += [depth + closes] * len(found[0])
        last = found.end()
        if depth < 0:
            raise Unreadable(text)
    if depth:
        raise Unreadable(text)
    return depths + [0] * (len(text) - last)


def _split(text: str, depths: list[int], pattern: re.Pattern[str]) -> tuple[list[str], list[str]]:
    """Split `text` at the matches of `pattern` outside of all brackets; return the parts and the matches between them.

    `depths` must be `_depths(text)`.
    """
    parts, dividers, begin = list[str](), list[str](), 0
    for match in pattern.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[begin : match.start()])
            dividers.append(match[0])
            begin = match.end()
    return [*parts, text[begin:]], dividers


def _several(kind: str, parts: list[str], nesting: int) -> Several:
    r"""Parse each of `parts`; return them as one form of the kind `kind` (see `Several`).

    In a list or set `3 \pm \sqrt{2}` becomes two parts. Raises Unreadable if a part cannot be parsed, or if there are
    over MAX_PARTS.
    """
    if len(parts) > MAX_PARTS:
        raise Unreadable("too many parts")
    listed = kind not in ("", "or", "minus")
    forms = [_read(part, nesting + 1, listed) for part in parts]
    if kind in ("", "{}"):
        lists = [form.parts if isinstance(form, Several) and form.kind == "" else (form,) for form in forms]
        forms = [part for parts_of_one in lists for part in parts_of_one]
    return Several(kind, tuple(forms))


def _relation(text: str, sides: list[str], signs: list[str], nesting: int) -> Form:
    r"""Parse an equation or inequality. `sides` are the texts between the `signs` of `text`.

    `x = 5`, `5 = x` and `x \in A` become Named, `= 5` becomes the value alone, other texts a Relation. In `a \approx b`
    only a counts, or only b if a is a name or blank. A last `\approx b` after other signs is dropped. b must be
    readable, and no words.
    """
    signs = [_SIGNS.get(sign, sign) for sign in signs]
    if signs[0] == r"\in" and len(signs) == 1:
        return Named(_name(sides[0]), _read(sides[1], nesting + 1))
    if signs[-1] == r"\approx" and isinstance(_read(sides[-1], nesting + 1), Words):
        raise Unreadable(sides[-1])
    if len(signs) > 1 and signs[-1] == r"\approx":  # x = 5\sqrt{2} \approx 7.07
        sides, signs = sides[:-1], signs[:-1]
    if signs == [r"\approx"]:
        left, right = sides
        return _read(right if not left.strip() or _is_name(left) else left, nesting + 1)
    if r"\in" in signs or r"\approx" in signs:
        raise Unreadable(text)
    if signs == ["="] and _is_name(sides[1]) and not _is_name(sides[0]):
        sides = sides[::-1]  # 5 = x
    if signs[0] == "=" and (not sides[0].strip() or _is_name(sides[0])):
        rest = "".join(side + sign for side, sign in zip(sides[1:], [*signs[1:], ""], strict=True))
        form = _read(rest, nesting + 1)
        return Named(_name(sides[0]), form) if sides[0].strip() else form
    return Relation(_sides(_CROSS.sub(r"\\times ", side) for side in sides), tuple(signs))  # 12 x 5 = 60


def _sides(texts: Iterable[str]) -> tuple[Node, ...]:
    """Parse each text, without its unit and money sign, as an expression."""
    found = [quantity(_without_thousands(_MONEY.sub("", text).strip())) for text in texts]
    if any(side is None or side.percent or side.scale != 1 for side in found):
        raise Unreadable("words or a percent sign, which change a side")
    return tuple(read_expression(side.body) for side in found if side)


def _is_name(text: str) -> bool:
    """Tell whether a text can name a value: `x`, `f(x)`, `Area`, but no constant such as `e`, and no DOUBTS ("not")."""
    if any(not found[0].isupper() for found in DOUBTS.finditer(text)):  # OR and NO may be segments
        return False
    return _NAME.fullmatch(text.strip()) is not None and text.strip() not in ("e", "i", r"\pi")


def _name(text: str) -> str:
    """Return the name in a text, without spaces. Raises Unreadable if the text is no name."""
    if not _is_name(text):
        raise Unreadable(text)
    return compact(text.strip()).replace(" ", "")


def _bracketed(text: str, nesting: int) -> Form | None:
    """Parse a text in one pair of brackets: a point, an interval, a set, or one form in brackets that only group.

    Returns None if no single pair of brackets encloses the whole text, or if its brackets cannot hold what is inside.
    """
    opening = next((sign for sign in _SHAPES if text.startswith(sign)), None)
    ending = next((sign for sign in _ENDS if text.endswith(sign)), None)
    if opening is None or ending is None or len(text) < len(opening) + len(ending):
        return None
    inside = text[len(opening) : len(text) - len(ending)]
    try:
        depths = _depths(inside)
    except Unreadable:
        return None  # (1+x)(2+x): the first bracket closes before the end
    kind = _SHAPES[opening] + _ENDS[ending]
    if ("{" in kind) != ("}" in kind):
        return None
    if kind == "{}":
        if found := _BUILT.fullmatch(inside):  # {x | x < 3}
            return _read(found[1], nesting + 1)
        return _several(kind, _split(inside, depths, _AND)[0], nesting) if inside.strip() else None
    parts, _ = _split(inside, depths, _COMMA)
    if len(parts) > 1:
        return _several(kind, parts, nesting)
    if kind not in ("()", "[]") or _split(inside, depths, _LIST)[1]:
        return None
    return _read(inside, nesting + 1)


def _amount(text: str) -> Form:
    r"""Parse an expression with unit, percent sign or scale. An expression with `\pm` gives a list of two amounts."""
    found = quantity(text)
    if found is None or not found.body.strip():
        raise Unreadable(text)
    node = read_expression(found.body)
    letters = None
    if found.body != text and not found.percent and found.scale == 1 and not re.search(r"\\(?:text|circ)", text):
        letters = _read_or_none(text)
    if found.scale != 1:  # 3 million
        node = Op("*", (node, Num(Fraction(found.scale))))
    signed = dict.fromkeys((_signed(node, "mp"), _signed(node, "pm")))  # two values of 3 +- 2
    amounts = [Amount(each, found.unit, found.percent, letters) for each in signed]
    return amounts[0] if len(amounts) == 1 else Several("", tuple(amounts))


def _read_or_none(text: str) -> Node | None:
    """Parse a text as an expression; return None if that fails."""
    try:
        return read_expression(text)
    except Unreadable:
        return None


def _signed(node: Node, negative: str) -> Node:
    r"""Return one of the two values of an expression with `\pm` or `\mp`.

    The sign named `negative` ("pm" or "mp") becomes minus, the other sign becomes plus.
    """
    if not isinstance(node, Op):
        return node
    args = tuple(_signed(arg, negative) for arg in node.args)
    if node.name in ("pm", "mp"):
        return Op("neg", args) if node.name == negative else args[0]
    return Op(node.name, args)
