"""An engine that fails in a run of the command: what is said, what is saved, and that the run goes on as it was.

The command and its processes are as ever; Python itself puts the failing engines where a run builds its own.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

import failing_engines
from qerl_lab.cli.launch import GRACE_SECONDS
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared

pytestmark = pytest.mark.integration

HELPERS = Path(failing_engines.__file__).parent
UNITS = {name: metric.unit for name, metric in declared(("format", "answer")).items()}
RESTARTS = "rollout/engine_restarts"
SETTINGS = {
    "steps": 3, "checkpoint__every": 0, "optim__learning_rate": 0.02, "eval__questions": 4, "eval__samples": 1,
    "aqn__schedule": "linear", "aqn__reading": "equation", "aqn__sigma_start": 0.3, "aqn__stages": 2,
    "cpu_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def new_run(tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunDirectory]:
    def make(**changes: object) -> RunDirectory:
        run_dir = tmp_path_factory.mktemp("failing") / "run"
        run_dir.mkdir()
        cfg = tiny(**(SETTINGS | changes), run_dir=str(run_dir))
        (run_dir / "resolved.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False))
        return RunDirectory(run_dir)

    return make


def command(run: RunDirectory, plan: str = "", typed: str = "") -> tuple[int, str, str]:
    """Go on with a run while its engines fail by the plan: exit code, standard output, standard error."""
    words = shlex.split(typed)[1:] if typed else ["-m", "qerl_lab", f"resume={run.path}"]
    paths = [str(HELPERS / "failing_site"), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), failing_engines.VARIABLE: plan}
    ran = subprocess.run(
        [sys.executable, *words], cwd=run.path.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    if ran.returncode:
        waited = time.time() - (run.path / "FAILED").stat().st_mtime
        assert waited < GRACE_SECONDS / 2, "a rank waited for another until it was killed"
    return ran.returncode, ran.stdout, ran.stderr


def check_same(run: RunDirectory, whole: RunDirectory) -> None:
    """Everything but times, speeds, memory and restarts."""
    passing = [name for name, unit in UNITS.items() if unit in ("s", "tokens/s", "GiB")] + [RESTARTS]
    found, expected = (
        [
            (line["step"], {name: value for name, value in line["metrics"].items() if name not in passing})
            for line in of.metrics()
        ]
        for of in (run, whole)
    )
    assert found == expected
    for name in ("adapter/adapter_model.safetensors", "eval.parquet", "samples.jsonl"):
        assert (run.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert json.loads((run.path / "DONE").read_text())["steps"] == 3


def test_a_run_survives_a_failure_fails_at_the_second_and_goes_on_as_printed(new_run) -> None:
    """The second time it is killed besides, when the checkpoint is there and FAILED is not."""
    whole, run = new_run(), new_run()
    code, _, errors = command(whole)
    assert code == 0, errors

    code, output, errors = command(run, "timeout@2,die@4,die@5")
    assert code == 1, output + errors
    cause = "EngineFailed: the worker died (of an engine that was built because of this: the worker died)."
    assert run.reason.startswith(f"{cause} 1 of 3 steps are saved. Type python -m qerl_lab resume=")
    assert "warning: the engine failed (no answer in 0.2 s). Building it again and repeating what was asked." in errors
    assert f"failed: {run.reason}" in errors
    (typed,) = re.findall(r"failed: .* Type (python -m qerl_lab resume=\S+) to go on", errors)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    assert [line["metrics"].get(RESTARTS) for line in run.metrics()] == [None, 1]

    code, output, errors = command(run, "die@2,die@3,kill@2", typed)  # call 1 is step 2
    assert code == 1, output + errors
    assert run.reason == "Killed: signal 9 (SIGKILL) ended the process, as the system does when memory runs out"
    assert "step-000002" in [path.name for path in run.checkpoints.iterdir()]

    code, output, errors = command(run)
    assert code == 0, errors
    assert "continuing after step 2" in output
    check_same(run, whole)


def test_every_rank_learns_of_a_failure_and_none_waits_for_another(new_run) -> None:
    """Of rank 0's in the evaluation, which it makes alone; of rank 1's in a sync, and in a rollout of the next step."""
    whole, run = new_run(gpus=2), new_run(gpus=2)
    code, _, errors = command(whole)
    assert code == 0, errors

    code, output, errors = command(run, "die@1@0,die@2@0")
    assert code == 1, output + errors
    cause = "rank 0: the worker died (of an engine that was built because of this: rank 0: the worker died)"
    assert run.reason.startswith(f"EngineFailed: {cause}")
    assert "0 of 3 steps are saved" in run.reason

    code, output, errors = command(run, "sync@1@1,group@2@1,logprobs@3@1")
    assert code == 1, output + errors
    assert run.reason.startswith("EngineFailed: rank 1: the engine gave 0 log-probs for a completion of ")
    assert "(of an engine that was built because of this: rank 1: the engine gave completions for 1 of 2" in run.reason
    assert "warning: the engine failed (rank 1: the adapter did not arrive). Building it again" in errors
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    assert [line["metrics"].get(RESTARTS) for line in run.metrics()] == [None, 1]

    code, output, errors = command(run)
    assert code == 0, errors
    check_same(run, whole)
