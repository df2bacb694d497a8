"""A process that is asked to stop, and numbers that end a run."""

import math
import os
import subprocess
import sys

import pytest

from qerl_lab.config.schema import OptimConfig
from qerl_lab.train.stop import Diverged, Stop, refuse_infinite


def test_the_death_of_the_starter_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run's process. A run that is a call in a program outlives the shell that left the program behind."""
    inside, started = Stop(), Stop(parent=os.getppid())
    assert not started.requested
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert started.requested
    assert not inside.requested


def test_a_run_whose_command_is_killed_at_start_up_ends_within_15_seconds() -> None:
    """The child here is busy without a look at `requested`, as one that imports or starts vLLM."""
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


def test_what_is_infinite_is_named_with_what_to_lower() -> None:
    optim = OptimConfig(learning_rate=1e-4, max_grad_norm=0.5)
    refuse_infinite({"loss": 0.0}, 1, optim)
    said = r"gradient norm is infinite at step 3\. .+ \(it is 0\.0001\) or optim\.max_grad_norm \(it is 0\.5\)"
    with pytest.raises(Diverged, match=said):
        refuse_infinite({"loss": 0.0, "gradient norm": math.inf}, 3, optim)
