"""Commands with a stand-in for the run's process: signals, lost consoles, and failing ranks."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from qerl_lab.cli import launch
from qerl_lab.cli.train import main
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system import terminal
from standin import CRASHES_AFTER, DONE, FAILS, SIGNALLED, background, begin, seen, started
from waiting import has_ended, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("standin")]


def test_after_ctrl_c_the_command_waits_for_the_run_and_says_so(standin):
    parent = background(standin, f"seed={SIGNALLED}", "run_dir=run")
    run_dir = started("run")
    os.killpg(parent.pid, signal.SIGINT)  # to the whole group, as a terminal does
    out, err = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert (run_dir / "signals.json").exists(), "the parent left before the child had finished its step"
    assert err == f"{launch.STOPPING}\n"
    assert out.endswith(
        f"interrupted; 0 of 50 steps are saved. Continue with\n  {terminal.python_command()} -m qerl_lab resume=run\n"
    )
    assert json.loads((run_dir / "signals.json").read_text()) == [signal.SIGINT, signal.SIGTERM]
    assert RunDirectory(run_dir).status == "interrupted"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_parent_alone_is_handed_to_the_child_as_sigterm(standin, number):
    parent = background(standin, f"seed={SIGNALLED}", "run_dir=run")
    run_dir = started("run")
    parent.send_signal(number)
    parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert json.loads((run_dir / "signals.json").read_text()) == [signal.SIGTERM]


@pytest.mark.parametrize("words", [("run_dir=run",), ("-m", "hydra.sweep.dir=run")], ids=["run", "sweep"])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_after_another_signal_aborts_a_run_that_does_not_stop(standin, first, words):
    parent = background(standin, f"seed={SIGNALLED}", *words)
    child = psutil.Process(seen(started("run" if len(words) == 1 else "run/0-*"))["pid"])
    child.suspend()  # so that it handles no signal
    parent.send_signal(first)
    said = ""
    while launch.STOPPING not in said:
        said += parent.stderr.readline()
    time.sleep(launch.SAME_STOP_SECONDS[signal.SIGINT])
    parent.send_signal(signal.SIGINT)
    out, err = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert launch.ABORTING in err
    assert "Traceback" not in out + err
    assert "interrupted" in out
    assert has_ended(child)


def test_a_sweep_under_nohup_survives_a_closed_terminal_and_closed_pipes(standin):
    """test_console.py tests this for a single run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; children of children inherit it
    try:
        parent = background(standin, "-m", f"seed={DONE},{CRASHES_AFTER}", "hydra.sweep.dir=sweep")
    finally:
        signal.signal(signal.SIGHUP, before)
    parent.stdout.close(), parent.stderr.close()
    started("sweep/0-*")
    parent.send_signal(signal.SIGHUP)
    assert parent.wait(timeout=120) == 0
    assert len(list(Path("sweep").rglob("DONE"))) == 2


@pytest.mark.parametrize("how", ["ctrl-c", "sigterm", "stop file"])
def test_an_interrupted_sweep_starts_no_further_job_and_its_table_has_all_jobs(standin, how):
    parent = background(standin, "-m", f"seed={DONE},{SIGNALLED},{FAILS}", "hydra.sweep.dir=sweep")
    started("sweep/1-*")
    match how:
        case "ctrl-c":
            os.killpg(parent.pid, signal.SIGINT)
        case "stop file":  # a launcher's worker sees this file on any machine
            Path("sweep/INTERRUPTED").touch()
        case _:
            parent.terminate()
    out, err = parent.communicate(timeout=120)
    assert parent.returncode == 130
    assert "Traceback" not in err
    assert err.count(launch.STOPPING) == (how != "stop file")
    table = out[out.rindex("job  overrides") :].splitlines()
    assert [line.split()[2] for line in table[1:4]] == ["done", "interrupted", "not"]
    assert table[4] == "3 jobs in sweep: 1 done, 1 interrupted, 1 not run"
    assert not Path("sweep/2-adhoc-seed1/seen.json").exists()


RANKS = """
import os, signal, sys, time
rank, path = int(os.environ["RANK"]), sys.argv[1]
assert [os.environ[name] for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")] == ["2", str(rank), "127.0.0.1"]
def fail(reason):
    with open(os.path.join(path, "FAILED"), "w") as file: file.write(reason)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("code", "exit_code", "status", "reason"),
    [
        ("if rank: os.kill(os.getpid(), 9)\ntime.sleep(0.2); fail('RuntimeError: the other is gone')", 1, "failed",
         "Killed: signal 9 (SIGKILL) ended rank 1 of 2, as the system does when memory runs out"),
        ("if rank: fail('Diverged: NaN')\ntime.sleep(3600)", 1, "failed", "Diverged: NaN"),
        ("if rank: sys.exit(130)\ntime.sleep(0.2); fail('RuntimeError: the other is gone')", 130, "interrupted", ""),
        ("if rank: sys.exit(3)", 1, "failed", "NoRecord: rank 1 of 2 ended with status 3"),
        ("rank or open(os.path.join(path, 'DONE'), 'w').write('{}')", 0, "done", ""),
    ],
    ids=["killed", "diverged", "interrupted", "silent", "done"],
)  # fmt: skip
def test_the_first_rank_to_end_says_how_the_run_ended(tmp_path, monkeypatch, code, exit_code, status, reason):
    """The other ranks fail as a consequence, so their reasons do not count. A rank that hangs is killed."""
    script = tmp_path / "rank.py"
    script.write_text(RANKS + code)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: [sys.executable, "-S", str(script), str(run_dir)])
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1.0)
    assert begin(RunConfig(gpus=2), "run") == exit_code
    run = RunDirectory(Path("run"))
    assert run.status == status
    assert status != "failed" or run.reason.startswith(reason)


def test_a_run_cannot_be_resumed_while_it_goes_on_after_its_parent_was_killed(standin, capfd):
    parent = background(standin, f"seed={SIGNALLED}", "run_dir=run")
    run_dir = started("run")
    parent.kill()
    parent.wait(timeout=120)
    assert main(["resume=run"]) == 2
    assert "another process is running in" in capfd.readouterr().err
    os.kill(seen(run_dir)["pid"], signal.SIGKILL)
    wait_for(lambda: main(["resume=run"]) == 0, seconds=10)
