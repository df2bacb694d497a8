"""Check the fields of files that users write in YAML: claims to test, queues of runs."""

import math
from collections.abc import Mapping
from datetime import date
from typing import Any, NamedTuple

from qerl_lab.config.keys import spell_value


class Kind(NamedTuple):
    """A kind of field: its name in messages, the types that YAML reads, an example, and the item type of a list."""

    name: str
    types: tuple[type, ...]
    example: str
    items: type | None = None


TEXT, DAY = Kind("text", (str,), '"WORDS"'), Kind("day", (str, date), "2026-11-27")
NUMBER = Kind("number", (int, float, str), "0.02")  # YAML reads 1e-2 as text: the reader converts it
WHOLE, DIRECTION = Kind("whole number", (int,), "5"), Kind("whole number", (int,), "1")
LIST, MAPPING = Kind("list", (list,), "[A, B]"), Kind("mapping", (dict,), "{KEY: VALUE}")
TEXTS, WHOLES = Kind("list of texts", (list,), '["WORDS"]', str), Kind("list of whole numbers", (list,), "[0, 1]", int)
SWITCH = Kind("true or false", (bool,), "false")


def check_fields(
    values: Any, needed: Mapping[str, Kind], optional: Mapping[str, Kind], where: str
) -> dict[str, Any]:  # fmt: skip
    """Return the fields of `values`, which must be a dict with all `needed` and otherwise only `optional` fields.

    Leaves out optional fields that are null. Raises ValueError if a field is missing, unknown or not of its kind.
    `where` names the part of the file in messages.
    """
    if not isinstance(values, dict):
        given = "empty" if values is None else "no mapping"
        raise ValueError(f"{where} is {given}; write {', '.join(f'{name}: ...' for name in needed)}")
    kinds = {**optional, **needed}
    if unknown := [str(name) for name in values if name not in kinds]:
        raise ValueError(f"{where} has {min(unknown)}, which is none of {', '.join(sorted(kinds))}")
    if lacking := sorted({*needed} - values.keys()):
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
    found = {name: value for name, value in values.items() if name in needed or value is not None}
    for name, value in found.items():
        kind = kinds[name]
        fits = bool in kind.types if isinstance(value, bool) else isinstance(value, kind.types)  # a bool is no number
        if fits and kind.items is not None:
            fits = all(type(item) is kind.items for item in value)
        if not fits:
            problem = f"{where}: {name}={spell_value(value)} is no {kind.name}"
            raise ValueError(f"{problem}; write for example {name}: {kind.example}")
    return found


def parse_number(value: int | float | str, where: str, above: float = -math.inf) -> float:
    """Convert a field to a number; YAML reads 1e-2 as text. Raises ValueError unless it is finite and above `above`.

    `where` names the field in messages.
    """
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not above < number < math.inf:
        raise ValueError(f"{where} {value} is no number{f' above {above:g}' if above > -math.inf else ''}")
    return number
