"""OUT.partial becomes OUT when it is complete. The same command continues it, and another command is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.record.out import JOURNAL, Unfinished

ONE = {"format": "nvfp4", "ignore": ["lm_head"], "model": {"a": [1, 2]}}


def begin(out: Path, identity: dict = ONE, overwrite: bool = False) -> Unfinished:
    return Unfinished(out, identity, overwrite)


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def half_done(out: Path) -> None:
    with begin(out) as unfinished:
        (unfinished.folder / "a").write_text("whole")
        unfinished.note("a")
        (unfinished.folder / "b").write_text("ha")


def test_the_same_command_finds_what_is_complete(tmp_path):
    half_done(tmp_path / "out")
    with begin(tmp_path / "out") as again:
        assert again.has("a")
        assert not again.has("b"), "never noted"
        (again.folder / "a").write_text("cut")
        assert not again.has("a"), "another size"
        (again.folder / "a").unlink()
        assert not again.has("a")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"format": "mxfp4"}, ["format=nvfp4", "format=mxfp4 is given", "overwrite=true"]),
        ({"ignore": []}, ["Type 'ignore=[lm_head]' to continue", "ignore=[]"]),
        ({"model": {"a": [1, 3]}}, ["other files than model has now", "overwrite=true"]),
    ],
)
def test_another_command_is_refused_and_changes_nothing_unless_it_overwrites(tmp_path, change, parts):
    half_done(tmp_path / "out")
    before = files(tmp_path / "out.partial")
    with pytest.raises(ConfigError) as refusal:
        begin(tmp_path / "out", ONE | change)
    for part in parts:
        assert part in str(refusal.value)
    assert files(tmp_path / "out.partial") == before
    with begin(tmp_path / "out", ONE | change, overwrite=True) as unfinished:
        assert list(files(unfinished.folder)) == [JOURNAL]
        assert not unfinished.has("a")


def test_a_directory_of_somebody_else_is_left_alone(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("years")
    for overwrite in (False, True):
        with pytest.raises(ConfigError, match=r"out\.partial has files that this command did not write"):
            begin(tmp_path / "out", overwrite=overwrite)
    assert files(tmp_path / "out.partial") == {"thesis.tex": "years"}


def test_a_command_that_was_killed_in_its_first_journal_starts_again(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / f"{JOURNAL}.tmp").write_text("{")
    with begin(tmp_path / "out") as unfinished:
        assert list(files(unfinished.folder)) == [JOURNAL]


def test_two_processes_do_not_write_at_once(tmp_path):
    code = (
        "import sys; from pathlib import Path; from qerl_lab.record.out import Unfinished\n"
        "with Unfinished(Path(sys.argv[1]), {}, False): print('in', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        with pytest.raises(ConfigError, match="another process is writing"):
            begin(tmp_path / "out", {})
        other.stdin.close()
    with begin(tmp_path / "out", {}):
        pass


def fail(out: Path, *complete: str) -> None:
    with begin(out) as unfinished:
        (unfinished.folder / "a").write_text("whole")
        unfinished.note(*complete)
        raise ValueError("as asked")


@pytest.mark.parametrize(("complete", "left"), [([], []), (["a"], ["out.partial"])])
def test_what_fails_before_a_file_is_complete_leaves_nothing(tmp_path, complete, left):
    with pytest.raises(ValueError, match="as asked"):
        fail(tmp_path / "out", *complete)
    assert os.listdir(tmp_path) == left


def test_what_was_killed_at_the_last_rename_is_finished_by_the_same_command(tmp_path, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    half_done(tmp_path / "out")
    with monkeypatch.context() as patch, begin(tmp_path / "out") as unfinished:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            unfinished.finish()
    with begin(tmp_path / "out") as again:
        assert again.has("a")
        again.finish()
    assert files(tmp_path / "out") == {"a": "whole", "b": "ha"}


def test_what_was_killed_while_it_was_emptied_is_still_of_this_command(tmp_path, monkeypatch):
    def killed(path: Path) -> None:
        if path.name != JOURNAL:
            raise KeyboardInterrupt
        os.unlink(path)

    half_done(tmp_path / "out")
    journal_first = sorted((tmp_path / "out.partial").iterdir(), key=lambda path: path.name != JOURNAL)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", lambda self: iter(journal_first))
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            begin(tmp_path / "out", {}, overwrite=True)
    with begin(tmp_path / "out") as again:
        assert again.has("a")


@pytest.mark.parametrize("there", [[], ["out"], ["out.replaced"], ["out.replaced", "out"]])
def test_the_name_is_there_when_it_is_whole_and_what_is_replaced_stays_until_then(tmp_path, there):
    """Also after a process that was killed while it renamed: the old one set aside, or the new one in place too."""
    out = tmp_path / "deep" / "out"
    for name in there:
        (out.parent / name).mkdir(parents=True)
        (out.parent / name / "old").touch()
    with begin(out, overwrite=bool(there)) as unfinished:
        (unfinished.folder / "new").touch()
        assert there or not out.exists()
        assert "out" not in there or os.listdir(out) == ["old"]
        unfinished.finish()
    assert os.listdir(out) == ["new"]
    assert os.listdir(out.parent) == ["out"]
