"""Hooks of MkDocs: give the site the folders of the repository, the report pages, and API pages from docstrings.

Pages link to each other and to README.md, LOG.md and results/ by relative paths, which GitHub follows too. The site
therefore has the same folders.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "LOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "tests/README.md", "tests/planted.py")
FOLDERS = ("docs", "results", "src")
SHOWN = {".md", ".png", ".html", ".csv", ".json", ".yaml", ".css", ".py"}


def on_config(config: MkDocsConfig) -> None:
    """Add the API pages to the navigation."""
    config.nav.append({"API": [*api()]})


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository that are shown, and add generated pages."""
    shown = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SHOWN]
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    for path in [*sorted(shown), *(ROOT / name for name in BESIDE)]:
        site.append(File(str(path.relative_to(ROOT)), str(ROOT), config.site_dir, config.use_directory_urls))
    for name, text in (pages() | api()).items():
        site.append(File.generated(config, name, content=text))
    return site


def on_page_markdown(markdown: str, **_: object) -> str:
    """Set a list off from the line that introduces it: GitHub needs no empty line there, Python-Markdown does."""
    return re.sub(r":\n(?=- )", ":\n\n", markdown)


def pages() -> dict[str, str]:
    """Return the page that embeds each report of results/."""
    text = "# Report pages\n\nEach is one file that `python -m qerl_lab.report RUNS out=FOLDER` wrote.\n"
    for report in sorted((ROOT / "results").rglob("report.html")):
        name = report.relative_to(ROOT)
        text += f"\n## {name.parent}\n\n[Open it alone](../{name})\n\n"
        text += f'<iframe class="report" src="../{name}" title="{name.parent}" loading="lazy"></iframe>\n'
    return {"docs/reports.md": text}


def api() -> dict[str, str]:
    """Return a page for each package of the lab, with its modules' docstrings, and their list."""
    source, found = ROOT / "src", {"docs/api.md": ""}
    index = "# API\n\nFrom the docstrings of `src/qerl_lab`, a page for each package.\n\n"
    for package in sorted(path.parent for path in (source / "qerl_lab").glob("*/__init__.py")):
        modules = sorted(path for path in package.rglob("*.py") if path.stem not in ("__init__", "__main__"))
        names = [".".join(path.relative_to(source).with_suffix("").parts) for path in modules]
        body = "".join(f"\n::: {name}\n" for name in (f"qerl_lab.{package.name}", *names))
        found[f"docs/api/{package.name}.md"] = f"# qerl_lab.{package.name}\n{body}"
        index += f"- [qerl_lab.{package.name}](api/{package.name}.md)\n"
    return found | {"docs/api.md": index}  # in the order of `found`
