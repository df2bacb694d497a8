"""Hooks of MkDocs: give the site the folders of the repository, the report pages, and API pages from docstrings.

Pages link to each other and to README.md, LOG.md and results/ by relative paths, which GitHub follows too. The site
therefore has the same folders.
"""

import ast
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BESIDE = ("README.md", "LOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff", "tests/README.md", "tests/planted.py")
FOLDERS = ("docs", "results", "src")
SHOWN = {".md", ".png", ".html", ".csv", ".json", ".jsonl", ".yaml", ".css", ".py"}
LEAST_SCALE = 0.38  # of a picture on a narrow screen, where a wide one scrolls: smaller labels cannot be read
LONG_CELL = 40  # characters of a table cell that gets a wider column


def on_config(config: MkDocsConfig) -> None:
    """Add to the navigation the days of the log and the pages of results/, which an order needs, and the API pages."""
    results = next(part["Results"] for part in config.nav if "Results" in part)
    results.append({"Files of results": list_pages("results", "**/*.md")})
    results.append({"Days of the log": list_pages("docs/log", "*.md")[::-1]})
    config.nav.append({"API": [*api()]})


def list_pages(folder: str, pattern: str) -> list[dict[str, str]]:
    """List the pages of a folder for the navigation, each named by its path in the folder."""
    paths = sorted((ROOT / folder).glob(pattern))
    return [{str(path.relative_to(ROOT / folder).with_suffix("")): str(path.relative_to(ROOT))} for path in paths]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository that are shown, and add generated pages."""
    made = pages() | api()
    shown = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SHOWN]
    site = Files([file for file in files if file.src_dir != config.docs_dir])  # the theme's
    for name in [*(str(path.relative_to(ROOT)) for path in sorted(shown)), *BESIDE]:
        if name not in made:
            site.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for name, text in made.items():
        site.append(File.generated(config, name, content=text))
    return site


def on_page_markdown(markdown: str, **_: object) -> str:
    """Set a list off from the line that introduces it: GitHub needs no empty line there, Python-Markdown does."""
    return re.sub(r"(?m)^(?!- )(\S.*)\n(?=- )", r"\1\n\n", markdown)


def on_page_content(html: str, page: Page, **_: object) -> str:
    """Keep pictures and long cells of tables readable on a narrow screen, where their frames scroll."""

    def set_size(image: re.Match[str]) -> str:
        file = (ROOT / page.file.src_uri).parent / image[1]
        width, height = struct.unpack(">II", file.read_bytes()[16:24])  # the head of a PNG
        least = round(LEAST_SCALE * width)
        return f'{image[0]} width="{width}" height="{height}" style="min-width: {least}px"'

    html = re.sub(r'<img [^>]*src="([^":]+\.png)"', set_size, html)
    return re.sub(rf"<td(?=[^>]*>(?:[^<]|<(?!/td)){{{LONG_CELL},}}</td>)", '<td class="long"', html)


def pages() -> dict[str, str]:
    """Return the page that embeds reports, and the reports themselves: of each folder that docs/results.md shows."""
    shown = re.findall(r"!\[.*\]\(\.\./(results/.+)/.+\.png\)", (ROOT / "docs" / "results.md").read_text("utf-8"))
    found = make_reports(list(dict.fromkeys(shown)))
    text = (
        "# Report pages\n\nThey belong to the results that [results.md](results.md) shows. One of any folder: "
        "`python -m qerl_lab.report results/NAME out=DIR bench=results/bench`.\n"
    )
    for name in found:
        folder = name.removesuffix("/report.html")
        text += f"\n## {folder}\n\n[Open it alone](../{name})\n\n"
        text += f'<iframe class="report" src="../{name}" title="{folder}" loading="lazy"></iframe>\n'
    return found | {"docs/reports.md": text}


def make_reports(folders: list[str]) -> dict[str, str]:
    """Return the text of each folder's report.html, by path: the committed one, or one made in a copy of results/."""
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(ROOT / "results", Path(copy, "results"))
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}

        def make(folder: str) -> str:
            page = Path(copy, folder, "report.html")
            if not page.exists():
                command = [sys.executable, "-m", "qerl_lab.report", folder, f"out={folder}", "bench=results/bench"]
                subprocess.run(command, cwd=copy, env=environment, check=True, stdout=subprocess.DEVNULL)
            return page.read_text(encoding="utf-8")

        with ThreadPoolExecutor(2) as pool:
            return {
                f"{folder}/report.html": text for folder, text in zip(folders, pool.map(make, folders), strict=True)
            }


def api() -> dict[str, str]:
    """Return a page for each package of the lab, with its modules' docstrings, and their list."""
    source, found = ROOT / "src", {"docs/api.md": ""}
    index = "# API\n\nFrom the docstrings of `src/qerl_lab`, a page for each package.\n\n"
    for package in sorted(path.parent for path in (source / "qerl_lab").glob("*/__init__.py")):
        modules = sorted(path for path in package.rglob("*.py") if path.stem not in ("__init__", "__main__"))
        names = [".".join(path.relative_to(source).with_suffix("").parts) for path in modules]
        tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
        own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        own = [name for name in own if not name.startswith("_")]
        options = f"    options: {{show_root_heading: false, members: {own or 'false'}}}\n"  # not what it imports
        body = f"\n::: qerl_lab.{package.name}\n{options}" + "".join(f"\n::: {name}\n" for name in names)
        found[f"docs/api/{package.name}.md"] = f"# qerl_lab.{package.name}\n{body}"
        index += f"- [qerl_lab.{package.name}](api/{package.name}.md)\n"
    return found | {"docs/api.md": index}  # in the order of `found`
