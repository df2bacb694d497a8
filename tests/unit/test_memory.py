"""The memory of a machine, and the limits that control groups set on it."""

from pathlib import Path

import pytest

from qerl_lab.preflight import machine

GIB = 2**30
INFO = f"MemTotal: {64 * 2**20} kB\nSwapTotal: {2 * 2**20} kB\n"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the control groups, on a machine with 64 GiB of memory and 2 GiB of swap."""
    for name in ("INFO", "OWN_GROUPS", "MOUNT"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    machine.INFO.write_text(INFO)
    return machine.MOUNT


def group(folder: Path, limit: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")


def test_without_groups_it_is_what_the_machine_has(mount: Path) -> None:
    assert machine.memory_bytes() == 66 * GIB
    machine.INFO.unlink()
    assert machine.memory_bytes() is None


@pytest.mark.parametrize("place", ["pod/job", "pod", "."])  # its own, the one above, or the one that a container sees
def test_a_group_leaves_its_limit(place: str, mount: Path) -> None:
    machine.OWN_GROUPS.write_text("9:name=systemd:/\n0::/pod/job\n")
    group(mount / "pod" / "job", "max")
    group(mount / place, str(8 * GIB))
    group(mount / "other", str(GIB))
    assert machine.memory_bytes() == 8 * GIB


def test_a_process_moved_out_of_its_namespace_has_the_limit_of_the_root(mount: Path) -> None:
    machine.OWN_GROUPS.write_text("0::/../..")
    group(mount, "1000")
    group(mount.parent, "10")  # no group's
    assert machine.memory_bytes() == 1000
