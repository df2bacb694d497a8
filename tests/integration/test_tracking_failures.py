"""The mirror when MLflow is absent, fails or never answers. Runs that are killed are in test_resume.py."""

import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_store import config, log, mirrored, recorded, runs
from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking.__main__ import main
from qerl_lab.tracking.mlflow import resync
from qerl_lab.tracking.tracker import Tracker
from waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_an_absent_mlflow_is_reported_once_and_filled_later_by_resync(
    run_dir: Path,
    db: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        refused = f"http://me:secret@127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", refused)
    tracker = Tracker(config(run_dir), RunDirectory(run_dir))
    assert slowest_log(tracker, range(1, 20)) < 1
    log(tracker, range(20, 25))
    tracker.finish("FINISHED")
    mirror = RunDirectory(run_dir).mirror()
    assert (mirror["uri"], mirror.get("experiment_id")) == (refused.replace("me:secret", "***"), None)
    assert tracker.is_mirrored is False
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert f"python -m qerl_lab.tracking resync {run_dir}" in err
    assert f"{run_dir}/metrics.jsonl is complete" in err
    assert [entry for entry in caplog.records if entry.name.startswith("urllib3")] == []
    assert "secret" not in err + (run_dir / "mlflow.json").read_text()
    assert main(["resync", str(run_dir)]) == 1
    assert capfd.readouterr().err.count("\n") == 1
    assert f"added {len(recorded(run_dir))} points" in resync(RunDirectory(run_dir), db)


def slowest_log(tracker: Tracker, steps: range) -> float:
    """Return the longest time in seconds that one call of `log` took."""
    slowest = 0.0
    for step in steps:
        start = time.monotonic()
        log(tracker, range(step, step + 1))
        slowest = max(slowest, time.monotonic() - start)
        time.sleep(0.01)
    return slowest


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_outage_of_mlflow_is_filled_when_it_is_back_or_by_resync(
    run_dir: Path, db: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, comes_back: bool
) -> None:
    """Calls fail for a while: the outage and the return are printed once, and no point is missing."""
    is_down = threading.Event()

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def either(*args: Any, **keywords: Any) -> Any:
            if is_down.is_set():
                raise MlflowException("503")
            return call(*args, **keywords)

        return either

    for name in ("log_batch", "search_runs", "set_terminated"):
        monkeypatch.setattr(MlflowClient, name, checked(getattr(MlflowClient, name)))
    tracker = Tracker(config(run_dir, db), RunDirectory(run_dir))
    log(tracker, range(1, 4))
    wait_for(lambda: mirrored(db) == recorded(run_dir))
    is_down.set()
    assert slowest_log(tracker, range(4, 7)) < 1
    wait_for(lambda: tracker._followers["mlflow"]._is_away)
    time.sleep(0.3)
    if comes_back:
        is_down.clear()
        log(tracker, range(7, 9))
        wait_for(lambda: mirrored(db) == recorded(run_dir))
    tracker.finish("FINISHED")
    is_down.clear()
    assert tracker.is_mirrored is comes_back
    away, *back = capfd.readouterr().err.splitlines()
    assert "failed (MlflowException: 503)" in away
    assert ["is back" in line for line in back] == [True] * comes_back
    if not comes_back:
        assert f"python -m qerl_lab.tracking resync {run_dir}" in away
        assert 0 < len(mirrored(db)) < len(recorded(run_dir))
        assert runs(db)[0].info.status == "RUNNING"
        assert "found run" in resync(RunDirectory(run_dir), db)
        assert runs(db)[0].info.status == "KILLED"  # there is no DONE
    assert mirrored(db) == recorded(run_dir)


Child = Callable[[str, Path], subprocess.Popen[str]]


@pytest.fixture
def child() -> Iterator[Child]:
    """Yield a function that starts Python code with a tracker imported; kill its processes at the end."""
    begun: list[subprocess.Popen[str]] = []
    source = """
from pathlib import Path
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.tracking import tracker as tracker_module
from qerl_lab.tracking.tracker import Tracker
"""

    def begin(code: str, cwd: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", source + textwrap.dedent(code)]
        begun.append(subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def test_a_server_that_never_answers_holds_up_neither_the_end_nor_the_exit(run_dir: Path, child: Child) -> None:
    config(run_dir)
    process = child(
        f"""
        import socket, time
        tracker_module.FINISH_SECONDS = 1
        silent = socket.create_server(("127.0.0.1", 0))
        cfg = RunConfig()
        cfg.tracking.uri = f"http://127.0.0.1:{{silent.getsockname()[1]}}"
        tracker = Tracker(cfg, RunDirectory({str(run_dir)!r}))
        connection, _ = silent.accept()  # MLflow asks, and waits from here on
        tracker.log(1, {{"reward/mean": 1.0}})
        start = time.monotonic()
        tracker.finish("FINISHED")
        print(time.monotonic() - start, flush=True)
        """,
        run_dir.parent,
    )
    assert process.stdout
    waited = float(process.stdout.readline())
    ended = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert 1 <= waited < 3
    assert time.monotonic() - ended < 3
    assert process.returncode == 0
    assert err.count("\n") == 1, err
    assert "gave no answer within 1 s" in err


def test_mlflow_is_silent_while_a_run_makes_its_database(run_dir: Path, child: Child) -> None:
    config(run_dir)
    process = child(
        f"""
        tracker_module.FINISH_SECONDS = 200
        tracker = Tracker(RunConfig(), RunDirectory({str(run_dir)!r}))
        tracker.log(1, {{"reward/mean": 1.0}})
        tracker.finish("FINISHED")
        """,
        run_dir.parent,
    )
    assert process.communicate(timeout=300) == ("", "")
    assert mirrored(f"sqlite:///{run_dir.parent / 'mlflow.db'}") == recorded(run_dir)
