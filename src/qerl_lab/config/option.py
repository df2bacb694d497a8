"""A key of the schema: its default, its bounds, its meaning, and the error that a wrong value ends in."""

import difflib
import math
from dataclasses import field
from typing import Any

BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))  # of an option, and their words


class ConfigError(ValueError):
    """A configuration that cannot run. The message is for the user: given, allowed, what to type."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    only: str | None = None,
    unit: str = "",
) -> Any:
    """A field with its meaning and its bounds; `validate` and the generated docs read them from the metadata.

    `only` names the option of its group under which the key acts. `unit` is empty of text, of pure numbers, and of a
    count of what the key's meaning names.
    """
    metadata = {
        "help": help, "choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "only": only,
        "unit": unit, "default": default,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def spelled_number(number: float) -> str:
    """A bound as a person types it: 1e12 for 1000000000000.0, 1000 for 1000.0; whole numbers as they are."""
    if isinstance(number, int):
        return str(number)
    digits, _, exponent = f"{number:.9g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def bounds_in_words(metadata: Any) -> str:
    """`at least 1, at most 4096` of the metadata of an `option`; empty without bounds."""
    found = ((word, metadata[key]) for key, word in BOUNDS if metadata[key] is not None)
    return ", ".join(f"{word} {spelled_number(bound)}" for word, bound in found)


def did_you_mean(given: str, allowed: list[str]) -> str:
    """` Did you mean x?` where something allowed is close to what was given, else nothing."""
    close = difflib.get_close_matches(given.lower(), allowed, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def check_bounds(name: str, bounds: Any, value: Any) -> None:
    """Raise ConfigError for a value, or an item of a list, outside the bounds of its `option`."""
    if isinstance(value, list):
        for item in value:
            _check_item(f"{item} in {name}=[{','.join(map(str, value))}]", f"{name}=[{{}}]", bounds, item)
    elif value is not None:
        _check_item(f"{name}={value}", f"{name}={{}}", bounds, value)


def _check_item(given: str, spelling: str, bounds: Any, value: Any) -> None:
    """Check one value, `given` as the message has it; `spelling` says how another in its place is typed."""

    def refuse(allowed: str, remedy: str) -> None:
        raise ConfigError(f"{given} is not allowed; allowed: {allowed}.{remedy}")

    def example(text: Any) -> str:
        return f" Type for example {spelling.format(text)}."

    def usual(other: float) -> float:
        """The default, where it is a number."""
        default = bounds.get("default")
        return default if isinstance(default, int | float) else other

    if (choices := bounds.get("choices")) and value not in choices:
        # YAML reads an unquoted off as false, which arrives here as the text "False".
        quote = ' In a YAML file write "off" with its quotes.' if value == "False" and "off" in choices else ""
        refuse(", ".join(choices), quote or did_you_mean(value, list(choices)) or example(choices[0]))
    if isinstance(value, float) and not math.isfinite(value):
        refuse("a finite number", example(usual(1.0)))
    if (low := bounds.get("at_least")) is not None and value < low:
        refuse(f"at least {spelled_number(low)}", example(spelled_number(low)))
    if (low := bounds.get("above")) is not None and value <= low:
        refuse(f"above {spelled_number(low)}", example(spelled_number(usual(low + (bounds.get("at_most") or 1)))))
    if (high := bounds.get("at_most")) is not None and value > high:
        refuse(f"at most {spelled_number(high)}", example(spelled_number(high)))
