"""Read KEY=VALUE words into a dataclass of `option` fields, for every command but the main one, which is Hydra's.

The dataclass also produces `--help`.
"""

import csv
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from qerl_lab.config.arm import leaves
from qerl_lab.config.keys import TEXT, by_foreign_name, has_type, spell_value, unknown_key, wrong_type
from qerl_lab.config.option import ConfigError, bounds_in_words, check_bounds, did_you_mean
from qerl_lab.config.spelling import shell_word, unquoted
from qerl_lab.system.exits import OK, Main, command
from qerl_lab.system.processes import refuse_several

Options = TypeVar("Options")
WIDTH = 100
HELP = ("--help", "-h")
# Texts of values that are no text; other texts stay as they are, and then have the wrong type.
VALUES: Mapping[str, Any] = {"null": None, "true": True, "false": False}


@dataclass(frozen=True)
class Command(Generic[Options]):
    """A command beside the main one: its usage, its purpose, and the function that takes its options."""

    usage: str  # the command line before KEY=VALUE
    about: str
    options: type[Options]
    work: Callable[[Options], None]
    examples: tuple[tuple[str, str], ...] = ()  # (command, meaning)
    required: tuple[str, ...] = ()  # options that must be given; "a|b" requires one of the two
    bare: str = ""  # option whose values may be typed without KEY=
    alone: bool = False  # runs in one process: each of several would repeat the whole work

    def run(self, words: list[str]) -> int:
        """Print the manual, or run the command on the words. Raises ConfigError, and whatever the work raises."""
        if set(HELP) & set(words) or (self.required and not words):
            print(manual(self))
            return OK
        if self.alone:
            refuse_several(os.environ)
        self.work(self.read(words))
        return OK

    def read(self, words: Sequence[str]) -> Options:
        """Read the words into options. Raises ConfigError for a wrong word and for a missing one."""
        options = read(self.options, words, self.bare)
        for name in self.required:
            if not any(getattr(options, each) for each in name.split("|")):
                line = self.examples[0][0]
                example = next((word for word in line.split() if word.startswith(f"{name}=")), line)
                raise ConfigError(f"{name.replace('|', '= or ')}= is missing. Type for example {example}.")
        return options


def choose(commands: Mapping[str, Command[Any]], words: list[str]) -> int:
    """Run the subcommand that the first word names; without words list the subcommands."""
    name, *rest = words or HELP
    if name in HELP:
        width = max(len(command.usage) for command in commands.values()) + 2
        print("\n".join(line for command in commands.values() for line in entry(command.usage, command.about, width)))
        return OK
    if name not in commands:
        hint = did_you_mean(name, list(commands))
        raise ConfigError(f"{name} is not a command.{hint} Allowed: {', '.join(commands)}.")
    return commands[name].run(rest)


def main_of(commands: Mapping[str, Command[Any]]) -> Main:
    """Make the `main` of a module with subcommands; it returns the exit code."""

    def main(words: list[str]) -> int:
        return choose(commands, words)

    return command(main)


def read(kind: type[Options], words: Sequence[str], bare: str = "") -> Options:
    """Parse a command's words into a flat dataclass. Raises ConfigError for the first word that does not fit.

    Values are written as in Hydra's grammar, but a text needs no quotes. Words without a key are values of the option
    `bare`: paths from the shell.
    """
    types, defaults = get_type_hints(kind), kind()
    given: dict[str, Any] = {}
    typed_for: list[tuple[str, str]] = []  # key, word
    paths: list[str] = []
    for word in words:
        key, sign, text = word.lstrip("+").partition("=")
        # A path may have an equals sign in it, too.
        if bare and not word.startswith("-") and (not sign or (key not in types and os.path.exists(word))):
            paths.append(word)
            continue
        if word.startswith("-"):
            raise unknown_flag(word, {key: f"{key}=VALUE" for key in types}, HELP)
        if not sign or not key:
            raise unreadable_word(word, types)
        if key not in types:
            raise unknown_key(key, list(types), _hint(key, list(types)))
        given[key] = _value(key, types[key], text, getattr(defaults, key))
        typed_for.append((key, word))
    if paths and get_origin(types[bare]) is list:
        given[bare] = paths
        typed_for.append((bare, " ".join(paths)))
    elif paths:
        given[bare] = paths[0]
        typed_for += [(bare, path) for path in paths]
    refuse_repeated_keys(typed_for)
    made = kind(**given)
    for name, field, value in leaves(made):
        check_bounds(name, field.metadata, value)
    return made


def _hint(key: str, keys: list[str]) -> str:
    """Return ` Did you mean x?` for what a run or another program calls a key, or for a close name; else nothing."""
    meant = (by_foreign_name(key) or "").partition("=")[0]
    ends = (meant.rpartition(".")[2], meant.partition(".")[0])
    return next((f" Did you mean {end}?" for end in ends if end in keys), did_you_mean(key, keys))


def _value(key: str, kind: Any, text: str, default: Any) -> Any:
    """Read the text of a value as `kind`; `a,b` is the list `[a,b]`. Raises ConfigError for another type."""
    if get_origin(kind) is list:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        quote = '"' if '"' in inner else "'"
        items = next(csv.reader([inner], quotechar=quote, skipinitialspace=True), [])
        value: Any = [_scalar(item.strip(), get_args(kind)[0]) if item.strip() else None for item in items]
    else:
        value = _scalar(text, kind)
    if not has_type(value, kind):
        raise ConfigError(wrong_type(key, kind, text if isinstance(value, list) else value, default))
    return value


def _scalar(text: str, kind: Any) -> Any:
    if kind in TEXT:
        return None if text == "null" else unquoted(text)
    for number in (float,) if kind in (float, float | None) else (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return VALUES.get(text.lower(), text)


def unknown_flag(word: str, keys: Mapping[str, str], flags: Sequence[str]) -> ConfigError:
    """Return the error for a word with dashes; `keys` has what to type for a key, `flags` are the known flags."""
    key, sign, _ = word.lstrip("-").partition("=")
    key = key.replace("-", "_")
    close = did_you_mean(key, list(keys)) if sign else did_you_mean(word, list(flags))
    hint = f" Type {keys[key]}." if key in keys else close
    return ConfigError(f"{word} is not a flag; keys take no dashes.{hint or ' Type --help for what may be typed.'}")


def unreadable_word(word: str, keys: Mapping[str, Any]) -> ConfigError:
    """Return the error for a word outside of Hydra's grammar, or without a value; `keys` has the type of each."""
    if word in keys:
        return ConfigError(f"{word} has no value. Type {word}=VALUE.")
    key, sign, value = word.partition("=")
    if not sign:
        return ConfigError(f"{word} cannot be read. Type KEY=VALUE, or leave {word} out.")
    one = f" As one value that is {shell_word(key, value)}." if keys.get(key.lstrip("+")) in TEXT else ""
    return ConfigError(
        f"{spell_value(word)} cannot be read. Type KEY=VALUE, and put a value that has one of , = ( ) [ ] {{ }} "
        f"or spaces in it between quotes, inside the shell's: \"KEY='a, b'\".{one}"
    )


def refuse_repeated_keys(lines: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if two of the (key, word) pairs have the same key."""
    words: dict[str, list[str]] = {}
    for key, word in lines:
        words.setdefault(key, []).append(word)
    for key, given in words.items():
        if len(given) > 1:
            raise ConfigError(f"{key} is given {len(given)} times: {' '.join(given)}. Type one of them.")


def manual(command: Command[Any]) -> str:
    """Format the text of `--help`: examples, then every key with its default and meaning."""
    options = leaves(command.options())
    lines = [command.about, "", f"  {command.usage}{' KEY=VALUE ...' if options else ''}"]
    lines += ["", "Examples:"] if command.examples else []
    for line, meaning in command.examples:
        lines += [f"  {line}", f"      {meaning}"]
    lines += ["", "Keys and their defaults:"] if options else []
    for name, field, default in options:
        lines += key_entry(name, field, default, 26)
    return "\n".join([*lines, "", "Exit codes: 0 done, 1 failed, 2 a wrong command or input, 130 interrupted."])


def key_entry(name: str, field: Any, default: Any, width: int) -> list[str]:
    """Format the lines of the manual for one key."""
    shown = spell_value(default)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    allowed = ", ".join(field.metadata["choices"] or ()) or bounds_in_words(field.metadata)
    return entry(f"{name}={shown}", field.metadata["help"] + (f" ({allowed})" if allowed else ""), width)


def entry(name: str, text: str, width: int) -> list[str]:
    """Format `  name    text` with the text wrapped in its column; a long name gets its own line."""
    lines = textwrap.wrap(text, WIDTH - width - 2, break_on_hyphens=False) or [""]
    head = [f"  {name}"] if len(name) >= width else [f"  {name:<{width}}{lines.pop(0)}"]
    return head + [" " * (width + 2) + line for line in lines]
