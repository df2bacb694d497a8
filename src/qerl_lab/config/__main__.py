"""`python -m qerl_lab.config tables`: print every group, option and key as Markdown for docs/configuration.md."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.system import exits

with exits.starting(__name__):
    import yaml

    from qerl_lab.cli.grammar import Command, main_of
    from qerl_lab.cli.manual import GROUPS, default_options, describe
    from qerl_lab.config.arm import is_of_arm, leaves
    from qerl_lab.config.conf_folder import choices_of, group_folder
    from qerl_lab.config.keys import schema, spell_value, type_words
    from qerl_lab.config.option import ConfigError, bounds_in_words, option
    from qerl_lab.config.schema import RunConfig
    from qerl_lab.system.terminal import format_path

MARK = "<!-- From here on `python -m qerl_lab.config tables page=docs/configuration.md` writes this page. -->\n"
LABELS = ("experiment", "scale", "differs_in")  # keys that an option sets to its own name


@dataclass
class TablesOptions:
    page: str | None = option(None, "Markdown file whose end, after its mark, is written anew; null prints the tables")


def write_tables(options: TablesOptions) -> None:
    """Print the tables, or replace the tables in the page. Raises ConfigError for a page without the mark."""
    if options.page is None:
        print(tables(), end="")
        return
    path = Path(options.page).expanduser()
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    prose, mark, _ = text.partition(MARK)
    if not mark:
        raise ConfigError(f"page={options.page} has no line {MARK.strip()}. Type page=docs/configuration.md.")
    path.write_text(prose + mark + tables(), encoding="utf-8")
    print(f"written: {format_path(path)}")


def tables() -> str:
    """Return two chapters of Markdown: groups with their options, sections with their keys."""
    parts = ["\n## Every group\n", *(_group(name) for name in GROUPS), "\n## Every key\n"]
    nodes: dict[str, list[str]] = {}
    for name, field, default in leaves(RunConfig()):
        node = name.rpartition(".")[0]
        nodes.setdefault(node, []).append(_key(name, field, default))
    head = "| key | default | unit | allowed | meaning | hash |\n|---|---|---|---|---|---|\n"
    for node, rows in nodes.items():
        parts.append(f"\n### {f'`{node}`' if node else 'Of the run'}\n\n{head}{''.join(rows)}")
    return "".join(parts)


def _group(group: str) -> str:
    default, rows = default_options().get(group), []
    for name in choices_of(group):
        path = group_folder(group) / f"{name}.yaml"
        sets = " ".join(f"`{word}`" for word in _sets(path, group))
        rows.append(
            f"| `{name}`{' (default)' if name == default else ''} | {_cell(describe(path))} | {_cell(sets)} |\n"
        )
    about = GROUPS[group][0].upper() + GROUPS[group][1:]
    return f"\n### `{group}=`\n\n{about}.\n\n| option | | sets |\n|---|---|---|\n{''.join(rows)}"


def _sets(path: Path, group: str) -> list[str]:
    """List what an option sets: other options, the lists of a sweep, then keys except its own name."""
    content, words = yaml.safe_load(path.read_text(encoding="utf-8")) or {}, []
    for entry in content.pop("defaults", []):
        named = entry if isinstance(entry, dict) else {group: entry}
        words += [f"{key.removeprefix('override ').lstrip('/')}={value}" for key, value in named.items()]
    sweeper = content.pop("hydra", {}).get("sweeper", {})
    words += [f"{key.lstrip('+')}={value}" for key, value in sweeper.get("params", {}).items()]
    prefix = "" if group in ("experiment", "scale", "sweeps") else f"{group}."
    return words + [f"{name}={spell_value(value)}" for name, value in _flat(content, prefix) if name not in LABELS]


def _flat(node: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return found


def _key(name: str, field: Any, default: Any) -> str:
    about, kind = field.metadata, schema()[name]
    allowed = ", ".join(f"`{choice}`" for choice in about["choices"] or ())
    allowed = allowed or ": ".join(filter(None, (type_words(kind), bounds_in_words(about))))
    is_hashed = "yes" if is_of_arm(name) else ""
    cells = (f"`{name}`", f"`{spell_value(default)}`", about["unit"], allowed, about["help"], is_hashed)
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _cell(text: str) -> str:
    """Escape text for a table cell: pipes and tags outside of code."""
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
