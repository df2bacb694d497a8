"""Split a number from the text around it: units, money, percent, counted things, words such as "million"."""

import re
from dataclasses import dataclass
from itertools import takewhile

from qerl_lab.tasks.answers.tokens import ALIASES, FUNCTIONS, GREEK

# Units, separated by semicolons: the name, then other spellings, each also with a plural "s".
_NAMES = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre; nm nanometer nanometre
in inch inches; ft foot feet; yd yard; mi mile; AU; pc parsec; acre; ha hectare
ml milliliter millilitre mL; l liter litre L; gal gallon; cup
mg milligram; g gram gm; kg kilogram; lb pound lbs; oz ounce; ton tonne; mol mole
ms millisecond; s sec second; min minute mins; h hr hour; day; week; month; year yr
mph; kph kmph; Hz hertz; degree deg; rad radian; K kelvin; Pa pascal; N newton
J joule; kJ kilojoule; eV; erg; W watt; kW kilowatt; V volt; A ampere amp; ohm
dollar usd buck; cent; euro; yen; rupee
"""
UNITS = {alias: line.split()[0] for line in re.split("[;\n]", _NAMES.strip()) for alias in line.split()}
_ORDINALS = ("st", "nd", "rd", "th")
# Counted things that do not end in "s", or are so short that they would be read as a product of variables.
_THINGS = """
ad ads bag bed box bus can car cat cow dog egg hat jar kid man men pad pan pen pet pie pot row set toy van
people children women mice fish sheep deer geese teeth yuan yen won baht celsius fahrenheit
each left total altogether remaining all change profit
"""
_COUNTED = frozenset(_THINGS.split())
_NO_PLURAL = re.compile(r"ss$|us$|is$|'s$|^(?:perhaps|always|sometimes|seems|fails|exceeds)$")
_BEHIND = "per a an / in of for on at with every old tall long deep wide high away late over now"
_BEHIND_THINGS = frozenset(_BEHIND.split())  # words that may follow the thing without changing the number
_MATHEMATICS = (FUNCTIONS | GREEK | ALIASES.keys()) - UNITS.keys()  # `60/lambda x` is no `60 sec`
_ONE_LETTER = "msgJNWVKL"  # without a font these are units only after a plain number
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
# Words after a number that change its value, or make it none.
_CHANGING = """
or and not no nor never maybe perhaps wrong incorrect false guess but except if unless than when about between under
below half halves third thirds fourths fifths tens tenth tenths hundredths quarter quarters twice double triple plus
minus negative times by to from least most percent mod base am pm pi ln e i is are equals out
"""
_CHANGES = frozenset(_CHANGING.split())

_MONEY = r"\\(?:dollar|euro|pound|yen|rupee)(?![A-Za-z])"
_BEFORE = re.compile(rf"([-+]?)\s*({_MONEY})\s*")  # `\dollar 5`, `-\dollar 5`
_AFTER = re.compile(rf"\s*({_MONEY})$")  # `5 \euro`
_EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|\d))?"  # `^2`, `^{-1}`
_FONT_WORD = rf"\\text\{{[^{{}}]*\}}{_EXPONENT}"
_IN_FONT = re.compile(  # `5 \text{ cm}^2`, `60 \text{km}/\text{h}`, `60/\text{day}`, `5 sq. \text{ft}`
    r"(?<=[^\s(\[{])\s*(?:\\cdot\s*)?((?:(?:(?<=\d)|(?<=\d\s))/\s*)?(?:(?:sq\.?|square|cubic)\s+)?"
    rf"{_FONT_WORD}(?:\s*(?:/|\\cdot|\\times|\*)?\s*{_FONT_WORD})*)$"
)
_DEGREES = re.compile(r"(.*?)(?:\^\\circ\s*(?:\\text\{\s*)?([CFK])\}?)?")  # `180^\circ`, `20^\circ C`
_OF_ANGLES = re.compile(r"cis|sin|cos|tan|cot|sec|csc")
_OHM = re.compile(r"(?<=[\d}])\s*\\Omega$")  # `5 \Omega`
_PERCENT = re.compile(r"\s*(?:%|(?:\\text\{\s*)?\b(?:percent(?:age)?|per cent|pct)(?:\s*\})?)$")  # `40%`
_WORDS = re.compile(r"(?<=[\d)}\].!])\s*((?:/\s*)?[A-Za-z][A-Za-z' ./-]{0,40}" + _EXPONENT + r")$")  # `5 cm`, `60/day`
_RATE = re.compile(r"/\s*|an? ")  # `/day`, `an hour`
# `5 `, `-2.5e3 `, `2 \times 10^{-3} `: behind a plain number stands a unit, behind `5x ` a variable
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+|\s*\\(?:times|cdot)\s*10\s*\^\s*\{?\s*-?\d+\s*\}?)?\s+")


@dataclass(frozen=True)
class Quantity:
    """An answer, split into the text of its expression (`body`), its unit, its percent sign and its scale.

    `unit` is short, such as "cm^2", "km/h" or "dollar"; it is "" if the answer has no unit or counts things ("5
    apples"). `scale` is the factor of a word such as "million".
    """

    body: str
    unit: str = ""
    percent: bool = False
    scale: int = 1


def quantity(text: str) -> Quantity | None:
    """Split an answer such as "5 cm", "40%" or "3 million dollars" into expression, unit, percent and scale.

    Returns None if the words behind the number change it ("18 or more"), or name no unit or thing ("5 green").
    """
    unit = ""
    if found := _BEFORE.match(text):
        text, unit = found[1] + text[found.end() :], found[2][1:]
    if found := _AFTER.search(text):
        text, unit = text[: found.start()], found[1][1:]
    if found := _PERCENT.search(text):
        return Quantity(text[: found.start()], unit, percent=True)
    if r"^\circ" in text and not _OF_ANGLES.search(text):  # 180^\circ - 2x, 20^\circ C
        body, scale = _DEGREES.fullmatch(text).groups("")  # type: ignore[union-attr]
        return Quantity(body.replace(r"^\circ", " "), "degree" + scale)
    if found := _OHM.search(text):
        return Quantity(text[: found.start()], "ohm")
    if found := _IN_FONT.search(text):
        words = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", found[1])
        if re.search(r"[^A-Za-z .,'/^{}\\0-9-]|(?<![\w^{-])\d", words):
            return None
        return _read_words(text[: found.start()], words, unit)
    if (found := _WORDS.search(text)) and _may_be_unit(found[1], text[: found.start(1)], unit):
        return _read_words(text[: found.start()], found[1], unit)
    return Quantity(text, unit)


def _may_be_unit(words: str, body: str, money: str) -> bool:
    """Tell whether `words`, the text behind `body`, may be a unit or a thing: `5 cm`, `18 apples`, `60/day`, not `3xy`.

    `money` is the currency found beside the number, or "". With money a unit of two letters may follow `/`: `$5/kg`.
    """
    rate = _RATE.match(words)
    names = re.split(r"[ /^.]+", words[rate.end() :] if rate else words)
    first = names[0]
    is_product = all(len(name) == 1 or name.lower() in _MATHEMATICS for name in names if name)
    if is_product and len(first) > 1:  # `60 sin x`: letters and names of mathematics alone
        return False
    if rate:  # `60/day`, `5 an hour`; `60/ab` is a fraction
        shortest_unit = 2 if money else 3
        is_unit = len(first) >= shortest_unit and unit_of(first) != ""
        return is_unit or len(first) > 3 or first in _COUNTED
    if len(first) == 1:  # `5 m` is five meters, `5x m` a product
        return first in _ONE_LETTER and _NUMBER.fullmatch(body) is not None
    if unit_of(first) != "" or first in _SCALES or first in _COUNTED:
        return True
    if first in (*_ORDINALS, "sq", "cu", "per"):  # `3 per day`
        return True
    return max(map(len, names)) > 3  # a word, since products of variables have no such long names


def _read_words(body: str, words: str, money: str) -> Quantity | None:
    """Return `body` as a Quantity, with the scale and the unit in the text behind it: `words`, as in "million dollars".

    `money` is the currency found beside the number, or ""; a currency replaces the unit in `words`. Returns None if
    `words` change the number ("or more"), or name nothing that can be measured or counted ("red"): no unit, short
    symbol, plural, or word in _COUNTED.
    """
    parts = re.sub(r"\s+\^\s*", "^", words).replace(".", " ").replace("/", " / ").split()
    scale = 1
    while parts and (word := parts[0].lower().removesuffix("s")) in _SCALES:  # also "millions"
        scale *= _SCALES[word]
        parts.pop(0)
    if parts[:1] in (["squared"], ["cubed"]) or any(part.lower() in _CHANGES for part in parts):
        return None
    if parts and parts[0] not in (*_ORDINALS, "a", "an", "per", "/"):  # green apples, eggs per day
        thing = [parts[0], *takewhile(lambda word: word.lower() not in _BEHIND_THINGS, parts[1:])][-1].partition("^")[0]
        is_symbol = len(thing) < 3 or (len(thing) == 3 and not thing.islower())
        is_plural = thing.islower() and thing.endswith("s") and not _NO_PLURAL.search(thing)
        if not (is_symbol or is_plural or thing.lower() in _COUNTED or unit_of(thing)):
            return None
    return Quantity(body, money or unit_of(" ".join(parts)), scale=scale)


def unit_of(words: str) -> str:
    """Return the unit that `words` name, as in UNITS: "cm^2" for "square centimeters"; "" if they name none."""
    words = re.sub(r"\bper\b", "/", re.sub(r" squared\b", "^2", re.sub(r" cubed\b", "^3", words)))
    parts = re.sub(r"\s*([/^])\s*", r"\1", re.sub(r"[{}]", "", words)).split()
    power = ""
    while parts and parts[0].lower() in ("sq", "square", "cubic", "cu"):
        power = "^2" if parts.pop(0).lower() in ("sq", "square") else "^3"
    named = [_unit_of_word(part) for part in parts]
    return "".join(named) + power if all(named) else ""


def _unit_of_word(word: str) -> str:
    """Return the unit that one word names: "cm^2" for "centimeters^2", "km/h" for "km/hours"; "" if it names none."""
    stem, mark, power = word.partition("^")
    for spelling in (stem, stem.lower(), stem.removesuffix("s"), stem.lower().removesuffix("s")):
        if spelling in UNITS:
            return UNITS[spelling] + mark + power
    if "/" in stem:
        over = [_unit_of_word(part) for part in stem.split("/")]
        return "/".join(over) + mark + power if all(over) else ""
    return ""
