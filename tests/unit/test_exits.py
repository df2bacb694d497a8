"""The end of a command's process: its code, and what still happens once it is known."""

import subprocess
import sys

import pytest

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
    [("exits.leave(3)", 3, ""), ("exits.run(lambda words: 2)", 2, ""), ("sys.exit(3)", 3, "taken apart\n")],
)
def test_a_command_leaves_with_its_code_once_threads_and_handlers_are_done(end: str, code: int, last: str) -> None:
    """Only what was imported is not taken apart; an exit that is not ours is as ever."""
    done = subprocess.run([sys.executable, "-c", LEAVES + end], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, f"said\na thread\na handler\n{last}")
    assert done.stderr == "why"
