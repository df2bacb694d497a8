"""The end of a command's process: exit code, message, and what runs after `main`."""

import subprocess
import sys
from contextlib import suppress

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.system import exits

LEAVES = """
import atexit, sys, threading, time
from qerl_lab.system import exits
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
    [("exits.run(lambda words: 2)", 2, ""), ("sys.exit(3)", 3, "taken apart\n")],
)
def test_a_command_leaves_with_its_code_once_threads_and_handlers_are_done(end: str, code: int, last: str) -> None:
    """Only the teardown of imported modules is skipped; `sys.exit` alone does not skip it."""
    done = subprocess.run([sys.executable, "-c", LEAVES + end], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, f"said\na thread\na handler\n{last}")
    assert done.stderr == "why"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ConfigError("one.\n  two"), 2, "error: one.\n  two\n"),
        (ConfigError("uri=http://me:secret@host"), 2, "error: uri=http://***@host\n"),
        (ValueError("one\n  two"), 1, "error: one two\n"),
        (ValueError(), 1, "error: ValueError\n"),
        (OSError(28, "No space left on device", "file"), 1, "error: [Errno 28] No space left on device: 'file'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("go on"), 130, "interrupted; go on\n"),
    ],
    ids=repr,
)
def test_what_ends_a_command_is_one_message_and_its_code(
    raised: BaseException, code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(words: list[str]) -> int:
        raise raised

    assert exits.command(work)([]) == code
    assert capfd.readouterr() == ("", said)


def test_output_that_no_disk_took_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert exits.command(lambda words: print("a table", end="") or 0)([]) == 1
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
    assert capfd.readouterr().err == "error: [Errno 28] No space left on device\n"


def test_a_bug_keeps_its_traceback_without_secrets() -> None:
    code = "from qerl_lab.system import exits; exits.run(lambda words: {}['DB_PASS=abc'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert "DB_PASS=***" in done.stderr
    assert "abc" not in done.stderr
