"""docs/configuration.md ends with the tables of the schema and of conf/, and `tables` writes them."""

from pathlib import Path

import pytest

from qerl_lab.config import __main__ as tables

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"
COMMAND = "python -m qerl_lab.config tables page=docs/configuration.md"


def test_the_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["tables"]) == 0
    printed, found = capsys.readouterr().out, PAGE.read_text(encoding="utf-8").split(tables.MARK)[1]
    assert found == printed, f"the schema or conf/ changed: type {COMMAND}"


def test_the_end_of_a_page_is_written_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"prose\n{tables.MARK}old")
    assert tables.main(["tables", f"page={page}"]) == 0
    assert page.read_text() == f"prose\n{tables.MARK}{tables.format_tables()}"
    page.write_text("prose\n")
    assert tables.main(["tables", f"page={page}"]) == 2
    assert "has no line <!-- From here on" in capsys.readouterr().err
    assert page.read_text() == "prose\n"
