"""README.md and docs/ name only existing paths, links and files, and their command lines parse.

Each rule is a function of text, applied to the pages and to a line that breaks it.
"""

import ast
import importlib
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from qerl_lab.bench import job
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError
from qerl_lab.tools import search

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "qerl_lab"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LOG = [ROOT / "LOG.md", *sorted((ROOT / "docs" / "log").glob("*.md"))]
SITE = {  # the constants of the site's hook, which needs MkDocs to be imported
    statement.targets[0].id: ast.literal_eval(statement.value)
    for statement in ast.parse((ROOT / "docs" / "site_hook.py").read_text(encoding="utf-8")).body
    if isinstance(statement, ast.Assign) and statement.targets[0].id in ("BESIDE", "FOLDERS", "SHOWN")
}
FOLDERS = {"conf", "docs", "notebooks", "results", "src", "sweeps", "tests"}
PACKAGES = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
PAGE_OF_GROUP = {  # group of conf/ -> the page that says what each of its options is
    "algorithm": "algorithms", "aqn": "aqn", "experiment": "running", "format": "formats", "rollout": "running",
    "sweeps": "sweeps", "task": "tasks", "tracking": "running",
}  # fmt: skip
PLACEHOLDERS = {"FILE.py": str(Path(__file__)), "RUN_DIR": ".", "DIR": ".", "TIME": "t", "MODEL": "pocket", "N": "1"}


def named_paths(text: str) -> list[str]:
    """Return code spans that begin with a folder of the repository, are a package, or end like a source file."""
    spans = [span for span in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w./*-]+", span)]
    return [
        span
        for span in spans
        if span.partition("/")[0] in FOLDERS or span.rstrip("/") in PACKAGES or span.endswith((".py", ".ipynb"))
    ]


def missing_paths(text: str) -> list[str]:
    """Return named paths that are neither in the repository nor in the package; * and NAME stand for any name."""
    return [
        path
        for path in named_paths(text)
        if not any(any(root.glob(path.replace("NAME", "*"))) for root in (ROOT, SOURCE))
    ]


INNER = "|".join(path.parent.name for path in SOURCE.glob("*/*/__init__.py"))  # packages in packages


def drawn(text: str) -> set[str]:
    """Return the packages and files in the tree below `src/qerl_lab/`: one entry a line, more files on deeper lines."""
    lines = text.split("    src/qerl_lab/", 1)[1].splitlines()[1:]
    found, package = set[str](), ""
    for line in itertools.takewhile(lambda line: line.startswith(" " * 6), lines):
        if entry := re.match(r" {6}([a-z_]+)(/|\.py)", line):
            package = f"{entry[1]}/" if entry[2] == "/" else ""
            found.add(entry[1] + entry[2])
        found |= {package + name for name in re.findall(rf"(?<![\w/])(?:(?:{INNER})/)?\w+\.py", line)}
    return found


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page; the second of equal headings ends in -1."""
    slugs = [re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-") for line in re.findall(r"(?m)^#+ .*", text)]
    return {f"{slug}-{slugs[:at].count(slug)}" if slug in slugs[:at] else slug for at, slug in enumerate(slugs)}


def dead_links(text: str, folder: Path) -> list[str]:
    """Return relative link targets that do not exist, and anchors that no heading of the page has."""
    return [
        target
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text)
        if "://" not in target and is_dead(target, text, folder)
    ]


def is_dead(target: str, text: str, folder: Path) -> bool:
    name, _, anchor = target.partition("#")
    if name and not (folder / name).exists():
        return True
    page = (folder / name).read_text(encoding="utf-8") if name and anchor else text
    return bool(anchor) and anchor not in anchors(page)


def links_off_site(text: str, folder: Path) -> list[str]:
    """Return the links to files that the site leaves out, which `make docs` refuses."""
    found = []
    for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", text):
        if "://" not in target and (folder / target).is_file():
            path = (folder / target).resolve().relative_to(ROOT)
            shown = path.parts[0] in SITE["FOLDERS"] and path.suffix in SITE["SHOWN"]
            found += [] if shown or str(path) in SITE["BESIDE"] else [target]
    return found


def commands(text: str) -> Iterator[str]:
    """Yield the command lines `python -m qerl_lab...` of code blocks and code spans, joined and without comments."""
    whole = re.sub(r" \\\n +", " ", text)
    for line in re.findall(r"^ {4}(?:\S*/)?(python -m qerl_lab.*)$", whole, re.MULTILINE):
        yield re.split(r"\s+#", line)[0]
    yield from re.findall(r"`(python -m qerl_lab[^`\n]*)`", text)


def words_of(command: str) -> list[str]:
    """Return the words after `-m`, with the first of `a|b|c`, and with a real value for a placeholder."""
    words = [re.sub(r"\|[\w|]+", "", word) for word in shlex.split(command)[2:]]
    return [re.sub(rf"\b({'|'.join(PLACEHOLDERS)})\b", lambda found: PLACEHOLDERS[found[0]], word) for word in words]


def parse(command: str) -> object:
    """Parse a command line as the command does, without running it; return the result. Raises ConfigError."""
    module, *words = words_of(command.removesuffix(" --cfg job"))
    path = SOURCE / module.removeprefix("qerl_lab").removeprefix(".").replace(".", "/")
    if not (path.is_dir() or path.with_suffix(".py").exists()):
        raise ConfigError(f"{command} is no command")
    if "--help" in words or not words or words[0].startswith("resume="):
        return module
    if module in ("qerl_lab", "qerl_lab.tools.serve_line"):
        if any(word.startswith("+sweeps=") for word in words) and not any(word.startswith("seed=") for word in words):
            words.append("seed=0")  # fewer jobs, of one seed
        if "--config-dir" in words:
            at = words.index("--config-dir")
            words[at : at + 2] = [f'hydra.searchpath=["file://{ROOT / words[at + 1]}"]']
        return make_plan([word for word in words if word != "-m"], "-m" in words)
    if module == "qerl_lab.tools.search":
        return search.read_space([word for word in words if not search.is_own(word)], search.SearchOptions())
    found = vars(importlib.import_module(f"{module}.__main__" if path.is_dir() else module))
    if words[0] in found.get("COMMANDS", {}) or "COMMAND" not in found:
        options = found["COMMANDS"][words[0]].read(words[1:])
        if module == "qerl_lab.bench":
            job.check(options)  # the arms too
        return options
    return found["COMMAND"].read(words)


def unnamed(text: str, group: str, options: list[str]) -> list[str]:
    """Return the options of a group that no code span begins with, bare or as GROUP=OPTION."""
    return [name for name in options if not re.search(rf"`(?:{group}=)?{name}(?!\w)", text)]


def long_lines(text: str) -> list[str]:
    """Return lines above 120 characters, except lines of tables."""
    return [line for line in text.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_lines_of_pages_are_short_and_their_paths_exist():
    texts = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    wrong = {name: long_lines(text) + missing_paths(text) for name, text in texts.items()}
    assert {name: found for name, found in wrong.items() if found} == {}


def test_the_tree_names_every_file_of_the_package():
    files = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if not path.stem.startswith("__")}
    packages = {f"{package}/" for package in PACKAGES}
    found = drawn((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert found == files | packages, "enter a new file in the tree of docs/architecture.md"


@pytest.mark.parametrize(("group", "page"), PAGE_OF_GROUP.items())
def test_a_page_names_every_option_of_its_group(group: str, page: str):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert unnamed(text, group, choices_of(group)) == [], f"say in docs/{page}.md what they are"


def test_every_link_has_a_target_that_the_site_shows():
    texts = {page: page.read_text(encoding="utf-8") for page in [*PAGES, *LOG, *(ROOT / "results").rglob("*.md")]}
    wrong = {page: dead_links(text, page.parent) + links_off_site(text, page.parent) for page, text in texts.items()}
    assert {page: found for page, found in wrong.items() if found} == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", sorted({line for page in PAGES for line in commands(page.read_text(encoding="utf-8"))})
)
def test_every_command_line_parses(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert parse(command) is not None


def test_the_rules_find_errors(tmp_path: Path):
    assert missing_paths("see `train/nowhere.py`, `conf/scale/zzz_*.yaml`, `formats/`, `a/b`") == [
        "train/nowhere.py",
        "conf/scale/zzz_*.yaml",
    ]
    tree = ["src/qerl_lab/  x", "  a/   b.py (as in conf/y.py)", "       c.py", "  d.py  e", "f/"]
    assert drawn("\n".join(f"    {line}" for line in tree)) == {"a/", "a/b.py", "a/c.py", "d.py"}
    text = "`nf4`, `format=fp8 x`, `mxfp4_x`, bf16"
    assert unnamed(text, "format", ["nf4", "fp8", "mxfp4", "bf16"]) == ["mxfp4", "bf16"]
    assert long_lines(f"{'a' * 120}\n{'b' * 121}\n|{'c' * 121}") == ["b" * 121]
    (tmp_path / "page.md").write_text("# One `of_them`: two!\n")
    links = "[a](nowhere.md) [b](https://x.org/y.md) [c](page.md#one-of_them-two) [d](page.md#two) [e](#f) [g](#here)"
    assert dead_links(f"{links}\n## Here", tmp_path) == ["nowhere.md", "page.md#two", "#f"]
    links = "[a](results/pocket/pretrain.py) [b](.gitignore) [c](conf/config.yaml) [d](Makefile#x) [e](LOG.md)"
    assert links_off_site(links, ROOT) == [".gitignore", "conf/config.yaml", "Makefile"]
    assert anchors("# A b\n## A b\n") == {"a-b", "a-b-1"}
    wrong = ["python -m qerl_lab lora.rnk=3", "python -m qerl_lab.quantize fromat=nvfp4", "python -m qerl_lab.nope x"]
    wrong.append("python -m qerl_lab.bench step \"arms=['nvfp4 lora.rnk=3']\"")
    first, rest = wrong[0].rsplit(" ", 1)
    text = f"    {first} \\\n        {rest}   # why\nas `{wrong[1]}` and `{wrong[3]}` do\n    .venv/bin/{wrong[2]}"
    assert set(commands(text)) == set(wrong)
    for command in wrong:
        with pytest.raises(ConfigError):
            parse(command)
