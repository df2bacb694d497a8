"""A finished run whose record is damaged is refused in one sentence: which file, and what to type."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from run_directories import make_run


def without_step_2(path: Path) -> None:
    first, _, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *rest]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] if path.exists() else b"")


AWAY = "and the run is finished. Put it back as it was, or move RUN away and type the same line: it has the run anew."


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("DONE", cut, r"RUN/DONE cannot be read \(.+\)\. Move it away\."),
        ("env.2.json", cut, r"RUN/env\.2\.json cannot be read \(.+\)\. Move it away\."),
        ("sessions.json", cut, r"RUN/sessions\.json cannot be read \(.+\)\. Move it away\."),
        ("metrics.jsonl", Path.unlink, f"RUN/metrics.jsonl is missing, {AWAY}"),
        ("metrics.jsonl", without_step_2, f"RUN/metrics.jsonl lacks step 2, {AWAY}"),
        ("eval.parquet", Path.unlink, f"RUN/eval.parquet is missing, {AWAY}"),
        ("eval.parquet", cut, f"RUN/eval.parquet is no Parquet file, {AWAY}"),
    ],
)  # fmt: skip
def test_damage_is_named(name: str, harm: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0))
    run.refuse_damaged()
    harm(run.path / name)
    with pytest.raises(ConfigError, match=f"^{said.replace('RUN', re.escape(str(run.path)))}$"):
        run.refuse_damaged()


def test_a_run_without_evaluation_has_no_answers(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0, eval__questions=0))
    (run.path / "eval.parquet").unlink()
    run.refuse_damaged()
    assert run.status == "done"
    assert run.evaluations() == {}
