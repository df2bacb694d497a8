"""An engine that fails in a run of the command: what is said, what is saved, and that the run goes on as it was.

The command and its processes are as ever; Python itself puts the failing engines where a run builds its own.
"""

import json
import re

import pytest

from failing_engines import command
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.exits import OK
from qerl_lab.train import run as run_module
from qerl_lab.train.stop import Stop
from repeated import files_of, lines_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SETTINGS = {
    "steps": 3, "checkpoint__every": 0, "optim__learning_rate": 0.02, "eval__questions": 4, "eval__samples": 1,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__stages": 2,
    "cpu_threads": 1,
}  # fmt: skip


def test_a_run_whose_engine_fails_goes_on_as_printed(new_run) -> None:
    """It fails again and is killed besides, when the checkpoint is there and FAILED is not."""
    whole, run = (RunDirectory(new_run(**SETTINGS)) for _ in range(2))
    assert run_module.run(whole.config(), whole, Stop()) == OK

    code, output, errors = command(run, "die@3")
    assert code == 1, output + errors
    cause = "EngineFailed: the worker died"
    assert run.reason.startswith(f"{cause}. 1 of 3 steps are saved. Type python -m qerl_lab resume=")
    assert f"failed: {run.reason}" in errors
    assert "Traceback" not in errors
    assert "Traceback" in (run.path / "FAILED").read_text()
    (typed,) = re.findall(r"failed: .* Type (python -m qerl_lab resume=\S+) to go on", errors)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]

    code, output, errors = command(run, "die@2,kill@1", typed)  # call 1 is step 2
    assert code == 1, output + errors
    assert run.reason == "Killed: signal 9 (SIGKILL) ended the process, as the system does when memory runs out"
    assert "step-000002" in [path.name for path in run.checkpoints.iterdir()]

    code, output, errors = command(run)
    assert code == 0, errors
    assert "continuing after step 2" in output
    assert lines_of(run.path) == lines_of(whole.path)
    assert files_of(run.path) == files_of(whole.path)
    assert json.loads((run.path / "DONE").read_text())["steps"] == 3
