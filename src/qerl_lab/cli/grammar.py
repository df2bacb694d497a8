"""Parse KEY=VALUE arguments into a dataclass of `option` fields, and format `--help` from the same dataclass.

Every command uses this module except `python -m qerl_lab`: Hydra parses its arguments.
"""

import csv
import os
import shlex
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass
from functools import partial
from typing import Any, Generic, TypeVar, get_args, get_origin

from qerl_lab.config.arm import leaves
from qerl_lab.config.keys import TEXT, check_type, spell_value, translate_foreign_name, unknown_name_error
from qerl_lab.config.option import ConfigError, bounds_in_words, check_bounds, did_you_mean
from qerl_lab.config.spelling import shell_line, spell_list, unquoted
from qerl_lab.system.exits import OK, Main, command
from qerl_lab.system.processes import refuse_several_processes

Options = TypeVar("Options")
WIDTH = 100
HELP = ("--help", "-h")


@dataclass(frozen=True)
class Command(Generic[Options]):
    """A command other than `python -m qerl_lab`: usage, purpose, options, and the function `work` that runs it."""

    usage: str  # the command line before KEY=VALUE
    about: str
    options: type[Options]
    work: Callable[[Options], None]
    examples: tuple[tuple[str, str], ...] = ()  # (command, meaning)
    required: tuple[str, ...] = ()  # options that must be given
    bare: str = ""  # option with values that may be typed without KEY=
    alone: bool = False  # refuses to run in several processes, because each would repeat the whole work

    def run(self, arguments: list[str]) -> int:
        """Run the command with command-line arguments; return exit code 0.

        Prints the help instead for `--help`, or without arguments if an option is required. Raises ConfigError for
        wrong arguments or a missing required option, and the errors of `work`.
        """
        if set(HELP) & set(arguments) or (self.required and not arguments):
            print(command_help(self))
            return OK
        if self.alone:
            refuse_several_processes(os.environ)
        self.work(self.read(arguments))
        return OK

    def read(self, arguments: Sequence[str]) -> Options:
        """Parse command-line arguments (`key=value`) into the command's options.

        Raises ConfigError for a wrong argument, or if a required option is missing.
        """
        options = parse_options(self.options, arguments, self.bare)
        for name in self.required:
            if not getattr(options, name):
                line = self.examples[0][0]
                example = next((word for word in line.split() if word.startswith(f"{name}=")), line)
                raise ConfigError(f"{name}= is missing. Type for example {example}.")
        return options


def run_subcommand(commands: Mapping[str, Command[Any]], arguments: list[str]) -> int:
    """Run the subcommand that the first argument names; return the exit code. `commands` maps names to subcommands.

    Lists the subcommands for `--help` or without arguments. Raises ConfigError for an unknown name.
    """
    name, *rest = arguments or HELP
    if name in HELP:
        width = max(len(command.usage) for command in commands.values()) + 2
        for command in commands.values():
            print("\n".join(format_entry(command.usage, command.about, width)))
        print("Type --help after a command for its keys.")
        return OK
    if name not in commands:
        hint = did_you_mean(name, list(commands))
        raise ConfigError(f"{name} is not a command.{hint} Allowed: {', '.join(commands)}.")
    return commands[name].run(rest)


def main_of(commands: Mapping[str, Command[Any]]) -> Main:
    """Build the `main` of a module with these subcommands: it takes command-line arguments and returns an exit code.

    Expected errors become printed messages (see `exits.command`).
    """
    return command(partial(run_subcommand, commands))


def parse_options(kind: type[Options], arguments: Sequence[str], bare: str = "") -> Options:
    """Parse command-line arguments (`key=value`) into the dataclass `kind`, which has `option` fields and no sections.

    Values are written as in Hydra's grammar, but a text needs no quotes. Arguments without `key=`, such as paths from
    the shell, become the value of the option named `bare`. Raises ConfigError for an unknown or repeated key, or a
    value of a wrong type or out of bounds.
    """
    known = {leaf.name: leaf.field for leaf in leaves(kind())}
    types: dict[str, Any] = {name: field.type for name, field in known.items()}
    given: dict[str, Any] = {}
    words: list[tuple[str, str]] = []  # (key, argument)
    paths: list[str] = []
    for word in arguments:
        if word.startswith("-"):
            raise unknown_flag_error(word, {key: f"{key}=VALUE" for key in types}, HELP)
        key, sign, text = word.lstrip("+").partition("=")
        if bare:
            is_known, is_there = key in types, os.path.exists(word)
            is_path = is_there or not is_known  # a path may have the name of a key
            if sign:  # or an equals sign in it
                is_path = is_there and not is_known
            if is_path:
                paths.append(word)
                continue
        if not sign or not key:
            raise unreadable_override_error(word, types)
        if key not in types:
            meant = (translate_foreign_name(key) or "").partition("=")[0]
            ends = [end for end in (meant.rpartition(".")[2], meant.partition(".")[0]) if end in types]
            hint = f" Did you mean {ends[0]}?" if ends else did_you_mean(key, list(types))
            raise unknown_name_error(key, list(types), hint)
        given[key] = _parse_value(types[key], text)
        check_type(key, known[key], given[key])
        words.append((key, word))
    if paths:
        if get_origin(types[bare]) is list:
            given[bare] = paths
            words.append((bare, " ".join(paths)))
        else:
            given[bare] = paths[0]
            words += [(bare, path) for path in paths]  # a second one is refused
    refuse_repeated_keys(words)
    for key, value in given.items():
        check_bounds(key, known[key].metadata, value)
    return kind(**given)


def _parse_value(kind: Any, text: str) -> Any:
    """Parse a value as null, true, false, a number, a text or a list of these, whichever the type `kind` allows.

    For a list, `a,b` and `[a,b]` are the same. If the value does not fit `kind`, the result has another type, which the
    caller refuses.
    """
    if get_origin(kind) is list:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        quote = '"' if '"' in inner else "'"
        items = next(csv.reader([inner], quotechar=quote, skipinitialspace=True), [])
        return [_parse_value(get_args(kind)[0], item.strip()) if item.strip() else None for item in items]
    if kind in TEXT:
        return None if text == "null" else unquoted(text)
    numbers = (float,) if kind in (float, float | None) else (int, float)
    for number in numbers:
        try:
            return number(text)
        except ValueError:
            continue
    return {"null": None, "true": True, "false": False}.get(text.lower(), text)


def unknown_flag_error(argument: str, keys: Mapping[str, str], flags: Sequence[str]) -> ConfigError:
    """Return the error for an argument with dashes, such as --lr, that is not in the allowed `flags`.

    `keys` maps each known name to what to type for it without dashes, e.g. `lr` to `optim.learning_rate=VALUE`.
    """
    key, sign, value = argument.lstrip("-").partition("=")
    key = key.replace("-", "_")
    close = did_you_mean(key, list(keys)) if sign else did_you_mean(argument, list(flags))
    meant = keys.get(key, "")
    if value and meant == f"{key}=VALUE":  # under another name the value may mean something else
        meant = shlex.quote(f"{key}={value}")
    hint = f" Type {meant}." if meant else close or " Type --help for the list."
    return ConfigError(f"{argument} is not a flag; keys are typed without dashes.{hint}")


def unreadable_override_error(override: str, keys: Mapping[str, Any]) -> ConfigError:
    """Return the error for an override that Hydra cannot parse or that has no value.

    `keys` maps each known key to its type.
    """
    if override.lstrip("+~") in keys:
        return ConfigError(f"{override} has no value. Type {override}=VALUE, without spaces around the sign.")
    if override.lower() in ("help", "version"):
        return ConfigError(f"{override} cannot be read. Type --{override.lower()}.")
    key, sign, value = override.partition("=")
    if key in ("--config-dir", "-cd"):  # a flag of the main command alone
        return ConfigError(f"{override} cannot be read. Type hydra.searchpath=[DIR].")
    if not sign or not key:
        return ConfigError(
            f"{override} cannot be read. Type KEY=VALUE without spaces around the sign, or leave {override} out."
        )
    kind = keys.get(key.lstrip("+"))
    is_list = get_origin(kind) is list
    items = [item.strip() for item in value.split(",")]
    if kind not in TEXT and any(items) and not all(items) and not set("([{'\"") & set(value):
        values = [item for item in items if item]
        several = ",".join(values) if len(values) > 1 else "A,B"
        what = f"-m {key}={several} without spaces, or {key}={values[0]} for one value"
        if is_list:
            what = shell_line([f"{key}={spell_list(values)}"])
        return ConfigError(f"{override} lacks a value beside a comma. Type {what}.")
    example = r"'it\'s'" if "'" in value else "'a, b'"
    if is_list:
        example = "['a, b']"
    return ConfigError(
        f"{spell_value(override)} cannot be read. Type KEY=VALUE. If the value has a space, a quote or one of "
        f', = ( ) [ ] {{ }} type two pairs of quotes: "KEY={example}".'
    )


def refuse_repeated_keys(pairs: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if a key occurs twice. `pairs` has (key, override as typed) of each override."""
    overrides: dict[str, list[str]] = {}
    for key, override in pairs:
        overrides.setdefault(key, []).append(override)
    for key, given in overrides.items():
        if len(given) > 1:
            raise ConfigError(f"{key} is given {len(given)} times: {' '.join(given)}. Type one of them.")


def command_help(command: Command[Any]) -> str:
    """Format the `--help` text of a command."""
    options = leaves(command.options())
    lines = [command.about, "", f"  {command.usage}{' KEY=VALUE ...' if options else ''}"]
    if command.examples:
        lines += ["", "Examples:"]
    for line, meaning in command.examples:
        lines += [f"  {line}", f"      {meaning}"]
    if options:
        lines += ["", "Keys and their defaults:"]
    for name, field, default in options:
        lines += format_key_entry(name, field, default, 26)
    return "\n".join([*lines, "", "Exit codes: 0 done, 1 failed, 2 wrong command or input, 130 interrupted."])


def format_key_entry(name: str, field: Field[Any], default: Any, width: int) -> list[str]:
    """Format one key of a `--help` text as lines: `NAME=DEFAULT` in `width` columns, then meaning and bounds.

    `field` is the dataclass field of the key (see `option`). A long list is shown whole, on several lines, so that one
    can type it with a change; a long text is cut.
    """
    shown = spell_value(default)
    if isinstance(default, list):
        shown = _break_list(f"{name}={shown}").removeprefix(f"{name}=")
    elif len(shown) > 40:
        shown = shown[:37] + "..."
    allowed = ", ".join(field.metadata["choices"] or ()) or bounds_in_words(field.metadata)
    return format_entry(f"{name}={shown}", field.metadata["help"] + (f" ({allowed})" if allowed else ""), width)


def _break_list(text: str) -> str:
    """Break a list, written without blanks, into lines of at most WIDTH - 4 characters, after commas only."""
    lines = textwrap.wrap(text.replace(",", ", "), WIDTH - 4, break_on_hyphens=False, break_long_words=False)
    return "\n  ".join(line.replace(", ", ",") for line in lines)


def format_entry(name: str, text: str, width: int) -> list[str]:
    """Format one entry of a `--help` text as lines: `name` in `width` columns, then `text`, wrapped at WIDTH.

    A `name` of several lines stands above its text.
    """
    lines = textwrap.wrap(text, WIDTH - width - 2, break_on_hyphens=False) or [""]
    head = [f"  {line}" for line in name.splitlines()] if len(name) >= width else [f"  {name:<{width}}{lines.pop(0)}"]
    return head + [" " * (width + 2) + line for line in lines]
