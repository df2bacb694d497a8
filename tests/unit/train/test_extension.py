"""A finished run with more steps continues where it ended, by the schedules of the longer run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from qerl_lab.cli.jobs import extend_run
from qerl_lab.cli.train import main
from qerl_lab.config.arm import config_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight import question_counts
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train.run import run
from qerl_lab.train.stop import Stop
from run_directories import claimed, make_run


@pytest.fixture(scope="module")
def trained(tiny: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = tiny(
        steps=2, optim__learning_rate=0.01, optim__schedule="linear", algorithm__updates_per_rollout=2,
        aqn__schedule="linear", aqn__sigma_start=0.1, aqn__sigma_end=0.0, aqn__stages=4, aqn__reading="equation",
        checkpoint__keep=1,
    )  # fmt: skip
    directory = claimed(tmp_path_factory.mktemp("trained") / "run", cfg)
    directory.begin()
    assert run(directory.config(), directory, Stop()) == 0
    return directory.path


@pytest.fixture
def directory(trained: Path, tmp_path: Path) -> RunDirectory:
    """A finished run of two steps, which keeps its last checkpoint."""
    return RunDirectory(shutil.copytree(trained, tmp_path / "run"))


def test_what_cannot_be_extended_is_refused(
    trained: Path, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = (directory.path / "DONE").rename(directory.path / "moved")
    with pytest.raises(ConfigError, match="allowed: a finished run"):
        extend_run(directory, 4)
    done.rename(directory.path / "DONE")
    with pytest.raises(ConfigError, match=r"the run already has 2 steps; allowed: more\. Type for example steps=4"):
        extend_run(directory, 2)
    metrics = directory.path / "metrics.jsonl"
    whole = metrics.read_text()
    metrics.write_text("".join(line for line in whole.splitlines(True) if '"step": 1,' not in line))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl lacks 1 of 2 steps, the first of them 1, and"):
        extend_run(directory, 4)
    metrics.write_text(whole)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
        with pytest.raises(ConfigError, match=r"0\.00 GiB free, and its checkpoints take"):
            extend_run(directory, 4)
    (damaged := directory.checkpoints / "step-000002" / "scheduler.pt").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"lacks an intact checkpoint of step 2 \(scheduler\.pt does not match"):
        extend_run(directory, 4)
    shutil.copyfile(trained / "checkpoints" / "step-000002" / damaged.name, damaged)
    others = {"training_questions": 1, "training_sha256": "a", "heldout_questions": 1, "heldout_sha256": "b"}
    with monkeypatch.context() as patch:
        patch.setattr(question_counts, "recorded_questions", lambda _: others)
        with pytest.raises(ConfigError, match="questions have changed since the run began"):
            extend_run(directory, 4)
    assert directory.status == "done"  # as it was


def test_a_finished_run_goes_on_by_the_schedules_of_the_longer_one(
    tiny: Callable[..., RunConfig], directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    first = directory.result()
    extend_run(directory, 4)
    longer = directory.config()
    assert (longer.steps, longer.extended, directory.status) == (4, [2], "interrupted")
    rates: list[float] = []
    noted = register_optimizer_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    try:
        assert run(longer, directory, Stop()) == 0
    finally:
        noted.remove()
    assert rates == pytest.approx([0.005, 0.00375, 0.0025, 0.00125])  # 8 updates in all where there were 4
    out = capsys.readouterr().out
    assert "continuing after step 2" in out
    assert "extended from 2 to 4 steps, over which the schedules of noise and learning rate now stretch" in out
    rate = "policy/learning_rate"
    by_step = {line["step"]: line["metrics"] for line in directory.metrics() if rate in line["metrics"]}
    assert list(by_step) == [1, 2, 3, 4]
    # of a step's last update, the second
    assert [by_step[step][rate] for step in (2, 3, 4)] == pytest.approx([0.0025, 0.00375, 0.00125])
    assert {line["step"] for line in directory.metrics() if "eval/accuracy" in line["metrics"]} == {0, 2, 4}
    assert (directory.path / "DONE-2").read_text().count('"steps": 2') == 1
    assert (first["steps"], directory.result()["steps"]) == (2, 4)
    assert config_hash(longer) != config_hash(tiny(steps=4))
    extend_run(directory, 6)
    assert directory.config().extended == [2, 4]


def test_an_extension_reads_its_checkpoint_once(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[Path]()

    def load(path: Path, *, with_weights: bool = True) -> checkpoint.Saved:
        read.append(path)
        return original(path, with_weights=with_weights)

    original = checkpoint.load
    monkeypatch.setattr(checkpoint, "load", load)
    extend_run(directory, 4)
    assert read == [directory.checkpoints / "step-000002"]


def test_a_refused_extension_leaves_the_run_finished(
    directory: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = json.loads((directory.path / "env.json").read_text())
    (directory.path / "env.json").write_text(json.dumps(environment | {"gpus": [{"name": "a GPU"}]}))
    (directory.path / "resolved.yaml").write_text(directory.config_text().replace("device: cpu", "device: auto"))
    was, before = directory.config(), contents(directory)
    assert main([f"resume={directory.path}", "steps=4"]) == 2
    assert "cuda" in capsys.readouterr().err
    assert (directory.status, directory.config(), contents(directory)) == ("done", was, before)


@pytest.mark.parametrize(("changes", "start"), [
    ({}, "lora.start_from="), ({"lora__rank": 0, "format__name": "bf16"}, "model.path=")
])  # fmt: skip
def test_extending_a_run_without_a_checkpoint_names_a_new_run_with_its_weights(
    changes: dict[str, Any], start: str, tmp_path: Path
) -> None:
    """It has a checkpoint of another step, from which it does not continue."""
    directory = RunDirectory(make_run(tmp_path / "run", "bf16", 0, **changes))
    (directory.checkpoints / "step-000003").mkdir(parents=True)
    weights = directory.path / "model" if changes else directory.path
    with pytest.raises(ConfigError, match=rf"lacks an intact checkpoint of step 4 .* Type {start}{weights} to begin"):
        extend_run(directory, 8)


def contents(directory: RunDirectory) -> dict[str, bytes]:
    files = [path for path in directory.path.iterdir() if path.is_file() and path.name != "resolved.yaml"]
    return {path.name: path.read_bytes() for path in files}
