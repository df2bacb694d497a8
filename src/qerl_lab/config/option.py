"""Declare keys of the schema with default, bounds and meaning, and check values against the bounds.

Also defines what all of the lab uses: ConfigError and `require_package`.
"""

import difflib
import importlib.util
import math
from dataclasses import field
from typing import Any

BOUNDS = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))  # key of the metadata, and its wording


class ConfigError(ValueError):
    """A configuration that cannot run. The message tells the user what was given, what is allowed and what to type."""


def require_package(asked: str, package: str, remedy: str) -> None:
    """Raise ConfigError if `package` is not installed.

    For the message: `asked` is what needs the package, such as a setting (`key=value`), `remedy` what to type instead.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # no origin: a folder of that name, such as wandb leaves behind
        raise ConfigError(f"{asked} needs the package {package}, which is not installed. Type {remedy}.")


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
    """Declare a key of the schema: a dataclass field with default, meaning, bounds and unit.

    `only` names the one option of the group with which the key has an effect, e.g. nvfp4 for a key of `format`; None:
    with every option.
    """
    metadata = {
        "help": help, "choices": choices, "at_least": at_least, "above": above, "at_most": at_most, "only": only,
        "unit": unit, "default": default,
    }  # fmt: skip
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def spelled_number(number: float) -> str:
    """Format a number as a person types it: 1e12 for 1000000000000.0, 1000 for 1000.0."""
    if isinstance(number, int):
        return str(number)
    digits, _, exponent = f"{number:.9g}".partition("e")
    return f"{digits}e{int(exponent)}" if exponent else digits


def bounds_in_words(metadata: Any) -> str:
    """Format the bounds in a field's `metadata` (see `option`) as `at least 1, at most 4096`; empty without bounds."""
    bounds = ((word, metadata[key]) for key, word in BOUNDS if metadata[key] is not None)
    return ", ".join(f"{word} {spelled_number(bound)}" for word, bound in bounds)


def did_you_mean(given: str, allowed: list[str]) -> str:
    """Return ` Did you mean x?` if an allowed word is close to the given one, else an empty string."""
    close = difflib.get_close_matches(given.lower(), allowed, n=1, cutoff=0.7)
    return f" Did you mean {close[0]}?" if close else ""


def check_bounds(name: str, bounds: Any, value: Any) -> None:
    """Raise ConfigError if `value` is out of bounds or not among the choices. In a list each item is checked.

    None is always allowed. `name` is the key for the message, `bounds` the metadata of its dataclass field (see
    `option`).
    """
    low, above, high = (bounds[key] for key, _ in BOUNDS)
    usual = bounds["default"] if isinstance(bounds["default"], int | float) else None
    choices, is_list = bounds["choices"] or (), isinstance(value, list)
    for item in value if is_list else [value]:
        if item is None:
            continue
        if choices and item not in choices:
            allowed, example = ", ".join(choices), choices[0]
        elif isinstance(item, float) and not math.isfinite(item):
            allowed, example = "a finite number", str(1.0 if usual is None else usual)
        elif low is not None and item < low:
            # 0 often switches a part off, which other keys may exclude: lora.rank=0 with packed weights
            example = spelled_number(usual if low == 0 and usual is not None else low)
            allowed = f"at least {spelled_number(low)}"
        elif above is not None and item <= above:
            example = spelled_number(above + (high or 1) if usual is None else usual)
            allowed = f"above {spelled_number(above)}"
        elif high is not None and item > high:
            allowed, example = f"at most {spelled_number(high)}", spelled_number(high)
        else:
            continue
        given = f"{item} in {name}=[{','.join(map(str, value))}]" if is_list else f"{name}={value}"
        hint = did_you_mean(str(item), list(choices))
        if item == "False" and "off" in choices:  # YAML reads an unquoted off as false
            hint = ' In a YAML file write "off" with its quotes.'
        spelled = f"[{example}]" if is_list else example
        raise ConfigError(
            f"{given} is not allowed; allowed: {allowed}.{hint or f' Type for example {name}={spelled}.'}"
        )
