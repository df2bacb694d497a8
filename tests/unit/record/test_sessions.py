"""When a run ran: sessions that end or are killed."""

import json
import time
from pathlib import Path

import pytest

from qerl_lab.record.sessions import Sessions


def test_the_seconds_of_a_run_are_those_of_all_its_sessions(tmp_path: Path) -> None:
    """The first is killed after its line of 130, the second before it logs, the third ends."""
    Sessions(tmp_path).begin(100.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 130.0, "metrics": {}}\n{"st')
    Sessions(tmp_path).begin(200.0)
    third = Sessions(tmp_path)
    third.begin(time.time() - 5)
    assert third.end() == pytest.approx(30 + 0 + 5, abs=1)
    assert json.loads((tmp_path / "sessions.json").read_text())[:2] == [[100.0, 130.0], [200.0, 200.0]]


def test_an_orderly_end_is_the_end_of_a_session(tmp_path: Path) -> None:
    first = Sessions(tmp_path)
    first.begin(time.time() - 7)
    first.end()
    line = {"step": 1, "time": time.time() + 50, "metrics": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    again = Sessions(tmp_path)
    again.begin(time.time() - 2)
    assert again.end() == pytest.approx(9, abs=1)
