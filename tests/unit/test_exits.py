"""The end of a command's process: its code, and what still happens once it is known."""

import subprocess
import sys
from pathlib import Path

import pytest

LEAVES = """
import atexit, sys, threading, time
from qerl_lab import exits
class Kept:
    def __del__(self): print("taken apart", flush=True)
kept = Kept()
def late(): time.sleep(0.3); print("a thread")
threading.Thread(target=late).start()
atexit.register(print, "a handler")
print("said")
print("why", file=sys.stderr, end="")
"""


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [("exits.leave(3)", 3, ""), ("exits.run(lambda words: 2)", 2, ""), ("sys.exit(3)", 3, "taken apart\n")],
)
def test_a_command_leaves_with_its_code_once_threads_and_handlers_are_done(end: str, code: int, last: str) -> None:
    """Only what was imported is not taken apart; an exit that is not ours is as ever."""
    done = subprocess.run([sys.executable, "-c", LEAVES + end], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, f"said\na thread\na handler\n{last}")
    assert done.stderr == "why"


@pytest.mark.parametrize(
    ("given", "options", "code", "out", "err"),
    [
        ("2>/dev/full", "", 0, "standard error is cut here", ""),
        (">/dev/full", "", 1, "", "standard output is cut here"),
        (">/dev/full", ", is_printed=False", 0, "", "standard output is cut here"),
        (">/dev/full 2>&1", ", is_printed=False", 0, "", ""),
    ],
)
def test_a_console_on_a_full_disk_ends_no_work(
    tmp_path: Path, given: str, options: str, code: int, out: str, err: str
) -> None:
    (tmp_path / "work.py").write_text(
        "import sys\nfrom qerl_lab import exits\n"
        "def main(words):\n"
        "    for stream in (sys.stdout, sys.stderr) * 2: print('said', file=stream, flush=True)\n"
        "    open('record', 'w').close()\n"
        "    return exits.OK\n"
        f"exits.run(main{options})\n"
    )
    line = f"exec {sys.executable} work.py {given}"
    done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "record").exists()) == (code, True)
    for said, expected in ((done.stdout, out), (done.stderr, err)):
        assert said.count("is cut here (No space left on device)") == bool(expected)
        assert expected in said


def test_a_command_in_a_directory_that_is_gone_says_so(tmp_path: Path) -> None:
    code = (
        "import os, sys; from qerl_lab import exits; from qerl_lab.__main__ import main; gone = sys.argv.pop();"
        "os.mkdir(gone); os.chdir(gone); os.rmdir(gone); exits.run(main)"
    )
    words = ["dry_run=true", str(tmp_path / "gone")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    said = "error: the directory that this command was typed in is not there any more. Type cd DIR first.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
