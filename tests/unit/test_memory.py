"""The memory of a machine, and what the control groups of both versions leave of it."""

from pathlib import Path

import pytest

from qerl_lab.system import memory

GIB = 2**30
INFO = f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\nSwapTotal: {2 * 2**20} kB\n"


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the control groups lie, on a machine of 64 GiB with 2 GiB of swap, of which 48 GiB are available."""
    for name in ("INFO", "OWN_GROUPS", "MOUNT"):
        monkeypatch.setattr(memory, name, tmp_path / name)
    memory.INFO.write_text(INFO)
    return memory.MOUNT


def group(folder: Path, files: tuple[str, str, str], limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    of_limit, of_usage, entry = files
    (folder / of_limit).write_text(f"{limit}\n")
    (folder / of_usage).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"{entry}_old 1\n{entry} {cache}\n")


def test_without_groups_it_is_what_the_machine_has(mount: Path) -> None:
    assert (memory.size_bytes(), memory.available_bytes()) == (66 * GIB, 48 * GIB)
    memory.INFO.unlink()
    assert (memory.size_bytes(), memory.available_bytes()) == (None, None)


@pytest.mark.parametrize(("line", "root", "files"), [
    ("0::/pod/job", "", memory.V2), ("4:memory:/pod/job", "memory", memory.V1),
    ("4:cpu,memory:/pod/job", "memory", memory.V1),
])  # fmt: skip
@pytest.mark.parametrize("place", ["pod/job", "pod", "."])  # its own, the one above, or the one that a container sees
def test_a_group_leaves_its_limit_less_what_is_used_but_for_the_page_cache(
    line: str, root: str, files: tuple[str, str, str], place: str, mount: Path
) -> None:
    memory.OWN_GROUPS.write_text(f"9:name=systemd:/\n2:cpuset:/pod\n{line}\n")
    group(mount / root / place, files, str(8 * GIB), 5 * GIB, 2 * GIB)
    group(mount / root / "other", files, str(GIB), 0, 0)
    assert (memory.size_bytes(), memory.available_bytes()) == (8 * GIB, 5 * GIB)


@pytest.mark.parametrize(("files", "line", "unlimited"), [
    (memory.V2, "0::/", "max"), (memory.V1, "4:memory:/", "9223372036854771712"),
])  # fmt: skip
def test_a_group_without_a_limit_takes_nothing_away(
    files: tuple[str, str, str], line: str, unlimited: str, mount: Path
) -> None:
    memory.OWN_GROUPS.write_text(line)
    group(mount / ("memory" if files is memory.V1 else ""), files, unlimited, GIB, 0)
    assert (memory.size_bytes(), memory.available_bytes()) == (66 * GIB, 48 * GIB)


def test_a_full_group_leaves_nothing(mount: Path) -> None:
    memory.OWN_GROUPS.write_text("0::/../..")  # of a process that was moved out of its namespace
    group(mount, memory.V2, "1000", 1001, 0)
    assert memory.available_bytes() == 0
