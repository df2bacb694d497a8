"""The mirror to Weights & Biases, against a stand-in for its client, which is not among the test packages."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from qerl_lab import preflight
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.resolved import write_config
from qerl_lab.tracking.tracker import Tracker


class Client(types.ModuleType):
    """Holds the runs by id, and refuses a step before the last one, as the client does."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = types.SimpleNamespace(name="wandb")  # type: ignore[assignment]
        self.runs: dict[str, types.SimpleNamespace] = {}
        self.asked: dict[str, Any] = {}

    def init(self, *, id: str, **asked: Any) -> types.SimpleNamespace:
        self.asked = asked
        run = self.runs.setdefault(id, types.SimpleNamespace(id=id, lines=[], step=0, summary={}, files=[]))

        def log(metrics: dict[str, float], step: int) -> None:
            assert step + 1 >= run.step
            run.lines.append((step, metrics))
            run.step = step + 1

        run.log, run.log_artifact = log, lambda artifact: run.files.extend(artifact.files)
        run.finish = lambda exit_code: setattr(run, "exit_code", exit_code)
        return run

    def Settings(self, **given: Any) -> dict[str, Any]:
        return given

    def Artifact(self, name: str, type: str) -> types.SimpleNamespace:
        files: list[str] = []
        return types.SimpleNamespace(files=files, add_file=lambda path: files.append(Path(path).name))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.setitem(sys.modules, "wandb", client := Client())
    return client


def test_a_run_and_its_resumption_are_one_run_without_a_step_twice(client: Client, tmp_path: Path) -> None:
    cfg = RunConfig()
    cfg.tracking.mlflow, cfg.tracking.wandb = False, True
    write_config(tmp_path, cfg)
    for last_step, steps, status in ((0, (1, 2, 3), "KILLED"), (2, (3, 4), "FINISHED")):
        tracker = Tracker(cfg, RunDirectory(tmp_path), last_step=last_step)
        for step in steps:
            tracker.log(step, {"reward/mean": float(step)})
        tracker.finish(status, {"accuracy_after": 0.5} if status == "FINISHED" else {})
    (run,) = client.runs.values()
    assert run.id == json.loads((tmp_path / "mlflow.json").read_text())["key"]
    assert run.lines == [(step, {"reward/mean": float(step)}) for step in (1, 2, 3, 4)]
    assert (run.summary, run.exit_code) == ({"accuracy_after": 0.5}, 0)
    assert set(run.files) == {"resolved.yaml", "metrics.jsonl"}
    assert client.asked["mode"] == "offline"
    assert client.asked["config"]["lora.rank"] == "32"
    assert tracker.mirror is None


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = RunConfig()
    cfg.tracking.wandb = True
    with pytest.raises(ConfigError, match=r"Type pip install 'qerl-lab\[wandb\]', or tracking=mlflow\."):
        preflight.check_machine(cfg, tmp_path)
