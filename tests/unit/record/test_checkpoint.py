"""Checkpoints: atomic, checked, and never a reason to lose or crash a run."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qerl_lab.config.paths import sha256
from qerl_lab.record import checkpoint
from qerl_lab.record.checkpoint import MANIFEST, STATE, last_step, load, newest, save, set_damaged_aside

FILES = {"adapter_model.safetensors": b"\x01" * 4000, "optimizer.pt": b"\x02" * 900, "sub/rng_state.pth": b"\x03" * 70}


def state(step: int) -> dict[str, object]:
    return {"step": step, "prompts_seen": 4 * step, "config": {"seed": 0}}


def write(folder: Path) -> None:
    assert list(folder.iterdir()) == []
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def saved(folder: Path, *steps: int, keep: int = 10) -> Path:
    """Save checkpoints of these steps; return the folder of the last."""
    for step in steps:
        path = save(folder, state(step), write, keep)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_its_files_its_state_and_their_checksums(tmp_path) -> None:
    path = saved(tmp_path / "checkpoints", 25)
    assert path.name == "step-000025"
    assert {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} == {*FILES, STATE, MANIFEST}
    assert set(json.loads((path / MANIFEST).read_text())) == {*FILES, STATE}
    assert load(path) == (found := newest(path.parent))
    assert (found.path, found.step, found.prompts_seen) == (path, 25, 100)


def test_the_newest_is_by_step_and_the_newest_few_are_kept(tmp_path) -> None:
    """Step 1,000,000 comes after step 999,999. A folder that is no checkpoint stays."""
    assert newest(tmp_path / "missing") is None
    (tmp_path / "step-mine").mkdir()
    assert newest(tmp_path) is None
    saved(tmp_path, 8, 9, 10, 999_999, 1_000_000, keep=3)
    assert names(tmp_path) == ["step-000010", "step-1000000", "step-999999", "step-mine"]
    assert newest(tmp_path).step == 1_000_000


def test_a_run_that_was_renamed_gets_no_second_directory(tmp_path) -> None:
    with pytest.raises(FileNotFoundError):
        saved(tmp_path / "renamed" / "checkpoints", 25)
    assert names(tmp_path) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def be_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink, be_folder])
@pytest.mark.parametrize("file", ["sub/rng_state.pth", STATE, MANIFEST])
def test_damage_to_any_file_is_seen_and_the_one_before_used(tmp_path, capsys, file: str, damage: Callable) -> None:
    path = saved(tmp_path, 1, 2, 3)
    damage(path / file)
    assert newest(tmp_path).step == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: checkpoint {path} is damaged (")
    assert file in line or file == MANIFEST  # a flipped bit there blames another file
    assert line.endswith("; using the previous one.")


def test_without_the_weights_only_the_state_is_verified(tmp_path, capsys) -> None:
    """The run's process reads the weights, and says what is damaged."""
    path = saved(tmp_path, 1, 2, 3)
    flip(path / "optimizer.pt")
    assert newest(tmp_path, with_weights=False).step == 3
    flip(path / STATE)
    assert newest(tmp_path, with_weights=False).step == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("changed", [{"step": 2, "prompts_seen": 8}, state(2) | {"later_field": 1}, []])
def test_a_state_of_another_version_is_damage_and_not_a_crash(tmp_path, capsys, changed: object) -> None:
    """The checksum of the state is right, because the other version wrote it too."""
    path = saved(tmp_path, 1, 2)
    (path / STATE).write_text(json.dumps(changed))
    digests = json.loads((path / MANIFEST).read_text()) | {STATE: sha256(path / STATE)}
    (path / MANIFEST).write_text(json.dumps(digests))
    assert newest(tmp_path).step == 1
    assert f"{STATE} is of another version" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", "{}"])
def test_a_manifest_without_a_checksum_of_the_state_is_damage(tmp_path, text: str) -> None:
    path = saved(tmp_path, 1)
    (path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=f"{STATE} is not in {MANIFEST}"):
        load(path)


def test_several_damaged_ones_are_passed_over(tmp_path, capsys) -> None:
    saved(tmp_path, 1, 2, 3)
    truncate(tmp_path / "step-000003" / "optimizer.pt")
    (tmp_path / "step-000002" / MANIFEST).write_text("[]")
    assert newest(tmp_path).step == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    flip(tmp_path / "step-000001" / STATE)
    assert newest(tmp_path) is None
    *others, last = capsys.readouterr().err.splitlines()
    assert [line.endswith("; using the previous one.") for line in others] == [True, True]
    assert last.endswith("; there is no earlier one, so training starts again.")


def test_a_full_disk_leaves_no_half_of_a_checkpoint(tmp_path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, state(2), lambda folder: (write(folder), Path("/dev/full").write_bytes(b"x")), keep=2)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("is_full", [True, False])
def test_a_full_disk_is_told_from_another_failure_of_torch(tmp_path, monkeypatch, is_full: bool) -> None:
    """torch.save raises a RuntimeError on a full disk, in words of its own."""

    def fail(folder: Path) -> None:
        raise RuntimeError("unexpected pos 447168 vs 447060")

    def write_bytes(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if is_full:
        monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(OSError if is_full else RuntimeError) as told:
        save(tmp_path, state(2), fail, keep=2)
    wanted = f"[Errno 28] No space left on device: '{tmp_path / 'step-000002'}'"
    assert str(told.value) == (wanted if is_full else "unexpected pos 447168 vs 447060")
    assert names(tmp_path) == []


@pytest.mark.parametrize(("at", "step"), [("mkdir", 3), ("write_text", 3), ("rename", 3), ("rename", 2)])
def test_dying_anywhere_in_a_save_loses_no_older_checkpoint(tmp_path, monkeypatch, at: str, step: int) -> None:
    """Also if the same step is saved again. The next save deletes the leftovers, also those of another process."""
    saved(tmp_path, 1, 2)

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, at, die)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, state(step), write, keep=1)
    assert newest(tmp_path).step == step - 1
    (tmp_path / ".step-000002.12345").mkdir()
    saved(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-000004"]


def test_a_manifest_is_written_last_and_only_the_rename_makes_a_checkpoint(tmp_path, monkeypatch) -> None:
    """At the moment of the rename the folder is whole and on the disk."""
    seen, flushed = [], []
    monkeypatch.setattr(checkpoint, "_flush_to_disk", flushed.append)
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: (seen.append((load(self).step, names(tmp_path))), rename(self, to))[1]
    )
    path = saved(tmp_path, 4)
    assert [(step, len(found)) for step, found in seen] == [(4, 1)]
    names_of_files = {Path(name).name for name in (*FILES, STATE, MANIFEST)}
    assert {file.name for file in flushed} >= names_of_files | {f".{path.name}.{os.getpid()}"}
    assert flushed[-1] == path.parent


def test_what_is_flushed_is_on_the_disk(tmp_path, monkeypatch) -> None:
    """The record is flushed before each checkpoint, which must not survive a crash of the machine alone."""
    synced = set[str]()
    monkeypatch.setattr(os, "fsync", lambda opened: synced.add(Path(f"/proc/self/fd/{opened}").resolve().name))
    (tmp_path / "metrics.jsonl").touch()
    saved(tmp_path / "checkpoints", 1)
    assert synced >= {"metrics.jsonl", "checkpoints", "optimizer.pt", MANIFEST}


@pytest.mark.parametrize("keep", [1, 2])
def test_damaged_later_checkpoints_do_not_crowd_out_new_ones(tmp_path, keep: int) -> None:
    """After a fall back to step 2, a save of step 3 must be there to continue from."""
    saved(tmp_path, 2, 4, 6)
    for name in ("step-000004", "step-000006"):
        flip(tmp_path / name / "optimizer.pt")
    assert newest(tmp_path).step == 2
    saved(tmp_path, 3, keep=keep)
    assert newest(tmp_path).step == 3
    assert names(tmp_path) == ["step-000002", "step-000003"][-keep:]


def test_damaged_later_checkpoints_count_no_longer_once_a_run_has_begun(tmp_path) -> None:
    """They are renamed until the next save deletes them, also a damaged one that was copied back."""
    path, aside = saved(tmp_path, 2, 4), tmp_path / ".step-000004.damaged"
    flip(path / "optimizer.pt")
    for _ in range(2):
        set_damaged_aside(tmp_path, newest(tmp_path).step)
        assert last_step(tmp_path) == 2
        assert names(tmp_path) == [aside.name, "step-000002"]
        shutil.copytree(aside, path)
    saved(tmp_path, 3)
    assert names(tmp_path) == ["step-000002", "step-000003"]
    for left in tmp_path.iterdir():
        flip(left / "optimizer.pt")
    assert newest(tmp_path) is None
    set_damaged_aside(tmp_path, 0)
    assert last_step(tmp_path) == 0
