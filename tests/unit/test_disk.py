"""Files are replaced atomically; a place that cannot be written is refused before the work."""

import errno
import fcntl
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qerl_lab.bench import __main__ as bench
from qerl_lab.bench import arm_processes
from qerl_lab.cli import jobs
from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.out import Unfinished
from qerl_lab.system.disk import make_directory, make_readable, replace_file, strict_json
from qerl_lab.tasks.module_file import GraderFailed
from qerl_lab.train.__main__ import needs_traceback


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o770, 0o660), (0o700, 0o600)])
def test_weights_are_as_open_as_their_folder(tmp_path: Path, folder: int, file: int) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    tmp_path.chmod(folder)
    make_readable(tmp_path.glob("*.safetensors"))
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == file


def test_a_number_that_is_not_finite_is_null_in_json() -> None:
    given = {"a": [1.5, float("nan"), (float("inf"), 2)], "b": {"c": -float("inf")}, "d": True}
    assert json.loads(strict_json(given)) == {"a": [1.5, None, [None, 2]], "b": {"c": None}, "d": True}


def test_a_full_disk_leaves_the_old_file_and_the_temporary_file_of_another_process(tmp_path: Path) -> None:
    """The second process meets a full disk while the first process has its temporary file there."""
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "a.1").write_bytes(b"half")
    (tmp_path / "a.2").symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'"):
        replace_file(tmp_path / "a", b"new", suffix="2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.1"]  # /dev/full has no end to be read to
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "a.1").read_bytes()) == (b"old", b"half")
    replace_file(tmp_path / "a", b"new", suffix="1")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("a", b"new")]


@pytest.mark.parametrize("folder", ["file/below", "/proc/nowhere/below", "file", "/proc"])
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("mine")
    with pytest.raises(ConfigError, match=r"^out=x cannot be written \(.*\)\. Type another directory\.$"):
        make_directory(Path(folder), "out=x")


def test_a_benchmark_is_refused_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    monkeypatch.setattr(arm_processes, "run", lambda options: pytest.fail("it began"))
    assert bench.main(["train_step", "out=/proc/nowhere/result"]) == 2
    assert "error: out=/proc/nowhere/result cannot be written (No such file" in capsys.readouterr().err


HOLDS: list[Callable[[Path], AbstractContextManager[object]]] = [  # a folder, as each kind that a process holds
    lambda folder: RunDirectory(folder).locked(),
    jobs.locked_sweep,
    lambda folder: Unfinished(folder / "out", {"of": "this process"}, overwrite=False),
]


@pytest.mark.parametrize("hold", HOLDS)
def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hold: Callable[[Path], AbstractContextManager[object]]
) -> None:
    (tmp_path / "resolved.yaml").touch()
    asked = list[object]()

    def refuse(*lock: object) -> None:
        asked.append(lock)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with hold(tmp_path):
        assert asked


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a"), False),
        (OSError(errno.EIO, "Input/output error", "a"), True),
        (ConfigError("a"), False),
        (GraderFailed("a"), True),
        (KeyError("a"), True),
    ],
)
def test_a_run_prints_the_traceback_of_what_may_be_a_bug_alone(error: Exception, has_traceback: bool) -> None:
    assert needs_traceback(error) == has_traceback
