"""Stop a run's process when its command dies."""

import os
import subprocess
import sys

import pytest

from qerl_lab.train.stop import Stop


def test_the_death_of_the_starter_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's process stops if its command dies. A run inside another program does not watch a parent."""
    inside, started = Stop(), Stop(parent=os.getppid())
    assert not started.requested
    monkeypatch.setattr(os, "getppid", lambda: -1)  # a suite that init adopted has 1
    assert started.requested
    assert not inside.requested


def test_a_run_whose_command_is_killed_at_start_up_ends_within_15_seconds() -> None:
    """The child here never looks at `requested`, like a process that imports packages or starts vLLM."""
    child = """
import sys, time
from qerl_lab.train.stop import Stop
Stop.on_signals(int(sys.argv[1]))
print("started", flush=True)
end = time.time() + 40
while time.time() < end: pass
"""
    starter = (
        "import os, subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]).wait()"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter, child], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    parent.kill()
    parent.communicate(timeout=15)  # waits for the child too, which holds the pipe
