"""The memory of a machine, and the limits that control groups of both versions set on it."""

from pathlib import Path

import pytest

from qerl_lab.system import memory

GIB = 2**30
INFO = f"MemTotal: {64 * 2**20} kB\nSwapTotal: {2 * 2**20} kB\n"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control groups lie, on a machine of 64 GiB with 2 GiB of swap."""
    for name in ("INFO", "OWN_GROUPS", "MOUNT"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    memory.INFO.write_text(INFO)
    return memory.MOUNT


def group(folder: Path, file: str, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(f"{limit}\n")


def test_without_groups_it_is_what_the_machine_has(mount: Path) -> None:
    assert memory.size_bytes() == 66 * GIB
    memory.INFO.unlink()
    assert memory.size_bytes() is None


@pytest.mark.parametrize(("line", "root", "file"), [
    ("0::/pod/job", "", memory.V2), ("4:memory:/pod/job", "memory", memory.V1),
    ("4:cpu,memory:/pod/job", "memory", memory.V1),
])  # fmt: skip
@pytest.mark.parametrize("place", ["pod/job", "pod", "."])  # its own, the one above, or the one that a container sees
def test_a_group_leaves_its_limit(line: str, root: str, file: str, place: str, mount: Path) -> None:
    memory.OWN_GROUPS.write_text(f"9:name=systemd:/\n2:cpuset:/pod\n{line}\n")
    group(mount / root / place, file, str(8 * GIB))
    group(mount / root / "other", file, str(GIB))
    assert memory.size_bytes() == 8 * GIB


@pytest.mark.parametrize(("file", "line", "unlimited"), [
    (memory.V2, "0::/", "max"), (memory.V1, "4:memory:/", "9223372036854771712"),
])  # fmt: skip
def test_a_group_without_a_limit_takes_nothing_away(file: str, line: str, unlimited: str, mount: Path) -> None:
    memory.OWN_GROUPS.write_text(line)
    group(mount / ("memory" if file == memory.V1 else ""), file, unlimited)
    assert memory.size_bytes() == 66 * GIB


def test_a_process_moved_out_of_its_namespace_has_the_limit_of_the_root(mount: Path) -> None:
    memory.OWN_GROUPS.write_text("0::/../..")
    group(mount, memory.V2, "1000")
    group(mount.parent, memory.V2, "10")  # no group's
    assert memory.size_bytes() == 1000
