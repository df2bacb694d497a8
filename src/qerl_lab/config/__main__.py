"""`python -m qerl_lab.config tables`: print every group, option and key as Markdown for docs/configuration.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.system import exits

with exits.starting(__name__):
    import yaml

    from qerl_lab.cli.grammar import Command, main_of
    from qerl_lab.cli.manual import GROUPS, default_option_by_group, describe_option
    from qerl_lab.config.arm import is_of_arm, leaves
    from qerl_lab.config.conf_folder import choices_of, group_folder
    from qerl_lab.config.keys import describe_type, spell_value, types_by_key
    from qerl_lab.config.option import ConfigError, bounds_in_words, option
    from qerl_lab.config.schema import RunConfig
    from qerl_lab.system.terminal import format_path

MARK = "<!-- From here on `python -m qerl_lab.config tables page=docs/configuration.md` writes this page. -->\n"
LABELS = ("experiment", "scale", "differs_in")  # keys that an option sets to its own name


@dataclass
class TablesOptions:
    page: str | None = option(None, "Markdown file whose end, after its mark, is written anew; null prints the tables")


def write_tables(options: TablesOptions) -> None:
    """Print the tables of options and keys, or write them into a Markdown page. Raises ConfigError."""
    if options.page is None:
        print(format_tables(), end="")
        return
    path = Path(options.page).expanduser()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    prose, mark, _ = text.partition(MARK)
    if not mark:
        raise ConfigError(f"page={options.page} has no line {MARK.strip()}. Type page=docs/configuration.md.")
    path.write_text(prose + mark + format_tables(), encoding="utf-8")
    print(f"written: {format_path(path)}")


def format_tables() -> str:
    """Format two chapters of Markdown: groups with their options, sections of the schema with their keys."""
    parts = ["\n## Every group\n", *(_format_group(name) for name in GROUPS), "\n## Every key\n"]
    nodes: dict[str, list[str]] = {}
    for name, field, default in leaves(RunConfig()):
        node = name.rpartition(".")[0]
        nodes.setdefault(node, []).append(_format_key_row(name, field, default))
    head = "| key | default | unit | allowed | meaning | hash |\n|---|---|---|---|---|---|\n"
    for node, rows in nodes.items():
        parts.append(f"\n### {f'`{node}`' if node else 'Of the run'}\n\n{head}{''.join(rows)}")
    return "".join(parts)


def _format_group(group: str) -> str:
    default, rows = default_option_by_group().get(group), []
    for name in choices_of(group):
        path = group_folder(group) / f"{name}.yaml"
        sets = " ".join(f"`{word}`" for word in _settings_of_option(path, group))
        cells = (f"`{name}`{' (default)' if name == default else ''}", describe_option(path), sets)
        rows.append(f"| {' | '.join(map(_escape_cell, cells))} |\n")
    about = GROUPS[group][0].upper() + GROUPS[group][1:]
    return f"\n### `{group}=`\n\n{about}.\n\n| option | | sets |\n|---|---|---|\n{''.join(rows)}"


def _settings_of_option(path: Path, group: str) -> list[str]:
    """List the settings in an option's YAML file as overrides (`key=value`), without its own name."""
    content, words = yaml.safe_load(path.read_text(encoding="utf-8")) or {}, []
    for entry in content.pop("defaults", []):
        named = entry if isinstance(entry, dict) else {group: entry}
        words += [f"{key.removeprefix('override ').lstrip('/')}={value}" for key, value in named.items()]
    sweeper = content.pop("hydra", {}).get("sweeper", {})
    words += [f"{key.lstrip('+')}={value}" for key, value in sweeper.get("params", {}).items()]
    prefix = "" if group in ("experiment", "scale", "sweeps") else f"{group}."
    return words + [
        f"{name}={spell_value(value)}" for name, value in _flatten_keys(content, prefix) if name not in LABELS
    ]


def _flatten_keys(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        found += _flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _format_key_row(name: str, field: Any, default: Any) -> str:
    about, kind = field.metadata, types_by_key()[name]
    allowed = ", ".join(f"`{choice}`" for choice in about["choices"] or ())
    allowed = allowed or ": ".join(filter(None, (describe_type(kind), bounds_in_words(about))))
    is_hashed = "yes" if is_of_arm(name) else ""
    cells = (f"`{name}`", f"`{spell_value(default)}`", about["unit"], allowed, about["help"], is_hashed)
    return f"| {' | '.join(map(_escape_cell, cells))} |\n"


def _escape_cell(text: str) -> str:
    """Escape text for a cell of a Markdown table: pipes, and tags outside of code."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(parts))


COMMANDS: dict[str, Command[Any]] = {
    "tables": Command(
        "python -m qerl_lab.config tables",
        "Print every group, option and key with its default, as docs/configuration.md has them.",
        TablesOptions,
        write_tables,
        examples=(
            ("python -m qerl_lab.config tables", "to the terminal"),
            (
                "python -m qerl_lab.config tables page=docs/configuration.md",
                "into the page, after a change of the schema",
            ),
        ),
    ),
}


main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
