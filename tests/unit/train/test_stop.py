"""A process that is asked to stop."""

import os

import pytest

from qerl_lab.train.stop import Stop


def test_the_death_of_the_starter_is_a_request_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run's process. A run that is a call in a program outlives the shell that left the program behind."""
    inside, started = Stop(), Stop(parent=os.getppid())
    assert not started.requested
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert started.requested
    assert not inside.requested
