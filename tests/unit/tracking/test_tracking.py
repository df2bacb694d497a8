"""metrics.jsonl, the values sent to MLflow, and the mirror to a fake Weights & Biases client."""

import json
import math
import os
import re
import shutil
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from qerl_lab import preflight
from qerl_lab.config.arm import leaves
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.tracking import mlflow
from qerl_lab.tracking.__main__ import main
from qerl_lab.tracking.mlflow import MlflowMirror, mlflow_uri
from qerl_lab.tracking.tracker import FINISH_SECONDS, Follower, Tracker
from qerl_lab.train.__main__ import needs_traceback
from run_directories import write_config


@pytest.fixture
def cfg() -> RunConfig:
    cfg = RunConfig()
    cfg.tracking.mlflow = False
    return cfg


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in RunDirectory(run_dir).metrics()]


def test_a_task_names_the_parts_of_its_reward_and_no_other_is_logged(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, RunDirectory(tmp_path), parts=["format", "tests_passed"])
    tracker.log(1, {"reward/format": 0.2, "reward/tests_passed": 1.0})
    with pytest.raises(ValueError, match=r"'reward/test_passed'\] are not declared"):
        tracker.log(2, {"reward/std": 0.0, "reward/test_passed": 1.0})
    with pytest.raises(ValueError, match=r"'reward/<part>'\] are not declared"):
        tracker.log(2, {"reward/<part>": 1.0})
    assert steps(tmp_path) == [1]


def test_only_a_run_in_a_store_has_the_file_of_one(cfg: RunConfig, tmp_path: Path) -> None:
    Tracker(cfg, RunDirectory(tmp_path))
    assert not (tmp_path / "mlflow.json").exists()
    RunDirectory(tmp_path).note_mirror(run_id="1")
    shutil.copytree(tmp_path, copy := tmp_path / "copy")
    Tracker(cfg, RunDirectory(copy))
    mirror = RunDirectory(copy).mirror()
    assert mirror["key"] != RunDirectory(tmp_path).mirror()["key"], "the copy is another run"
    assert "run_id" not in mirror


def test_docs_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table"]) == 0
    docs = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    heading, printed = docs.split("| metric |", 1)
    table = capsys.readouterr().out
    assert "| metric |" + printed == table, "paste what python -m qerl_lab.tracking table prints into docs/metrics.md"
    assert heading.startswith("# ")


def test_round_trip_is_exact_keeps_lines_that_share_a_step_and_writes_json(cfg: RunConfig, tmp_path: Path) -> None:
    """Values that are not finite become null, and are NaN when they are read."""
    tracker = Tracker(cfg, RunDirectory(tmp_path))
    tracker.log(0, {"eval/accuracy": 0.1})
    tracker.log(1, {"reward/mean": 1 / 3, "policy/loss": -1e-30})
    tracker.log(1, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "reward/mean": 2.0})
    tracker.finish("FINISHED")
    *exact, last = (line["metrics"] for line in RunDirectory(tmp_path).metrics())
    assert exact == [{"eval/accuracy": 0.1}, {"reward/mean": 1 / 3, "policy/loss": -1e-30}]
    assert math.isnan(last.pop("policy/loss"))
    assert math.isnan(last.pop("policy/grad_norm"))
    assert last == {"reward/mean": 2.0}
    assert steps(tmp_path) == [0, 1, 1]
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(written)["metrics"] == {"policy/loss": None, "policy/grad_norm": None, "reward/mean": 2.0}


def test_a_torn_last_line_is_not_read_and_is_cut_on_resume(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, RunDirectory(tmp_path))
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": float(step)})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start_of_3 = whole.rindex(b'{"step": 3')
    for length in range(start_of_3, len(whole)):
        path.write_bytes(whole[:length])
        assert steps(tmp_path) == [1, 2]
    resumed = Tracker(cfg, RunDirectory(tmp_path), last_step=2)
    resumed.log(3, {"reward/mean": 30.0})
    found = [(line["step"], line["metrics"]["reward/mean"]) for line in RunDirectory(tmp_path).metrics()]
    assert found == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_cut_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "metrics": {}}\n{"step": 2, "time": 1.0, "metrics": {}}\n')
    before = path.read_bytes()

    def killed(self: Path, target: Path) -> None:
        assert self.read_bytes() == before.splitlines(True)[0]  # the new file is whole before the old one goes
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        RunDirectory(tmp_path).cut_records(1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [
    "not json\n", "[1]\n", '{"step": 1}\n', '{"step": 1, "time": 1, "metrics": 3}\n',
    '{"step": "1", "time": 1, "metrics": {}}\n',
])  # fmt: skip
def test_a_broken_line_that_is_not_the_last_is_an_error_with_its_place(tmp_path: Path, bad: str) -> None:
    good = '{"step": 1, "time": 1.0, "metrics": {}}\n'
    (tmp_path / "metrics.jsonl").write_text(good + bad + good)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2, is not a metrics record.* Delete the line"):
        RunDirectory(tmp_path).metrics()


def test_a_full_disk_and_a_lost_directory_are_errors_that_name_the_file(cfg: RunConfig, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    tracker, metrics = Tracker(cfg, run), run.path / "metrics.jsonl"
    metrics.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left on device: '{metrics}'") as found:
        tracker.log(1, {"reward/mean": 0.0})
    assert not needs_traceback(found.value)
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match=str(metrics)):
        tracker.log(1, {"reward/mean": 0.0})


def test_uri_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg, record = RunConfig(), RunDirectory(tmp_path)
    assert mlflow_uri(cfg, record) == f"sqlite:///{tmp_path}/mlflow.db"
    record.note_mirror(uri="sqlite:////elsewhere/mlflow.db")
    assert mlflow_uri(cfg, record) == "sqlite:////elsewhere/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert mlflow_uri(cfg, record) == "http://from-environment:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "mlruns")
    assert mlflow_uri(cfg, record) == f"file://{tmp_path}/mlruns"
    cfg.tracking.uri = "http://from-config:5000"
    assert mlflow_uri(cfg, record) == "http://from-config:5000"


def test_an_outage_is_reported_with_the_end_of_a_long_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """MLflow says there what to set for a store that is a folder."""

    def refused() -> MlflowMirror:
        raise OSError(f"a store{' far away' * 40}: set MLFLOW_ALLOW_FILE_STORE=true")

    Follower(refused, lambda: "MLflow", "type resync").finish("FINISHED", {})
    assert capsys.readouterr().err.endswith("set MLFLOW_ALLOW_FILE_STORE=true); training goes on and type resync\n")


def test_what_the_user_sets_for_mlflow_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "99")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    mlflow.prepare_mlflow()
    names = ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_DISABLE_TELEMETRY")
    assert [os.environ[name] for name in names] == ["99", "true"]


def test_a_resumed_run_without_its_password_trains_and_says_what_to_type(
    cfg: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunDirectory(tmp_path).note_mirror(uri="http://***@host:5000")
    cfg.tracking.mlflow = True
    tracker = Tracker(cfg, RunDirectory(tmp_path))
    tracker.log(1, {"reward/mean": 0.5})
    began = time.monotonic()
    tracker.finish("FINISHED")
    assert time.monotonic() - began < FINISH_SECONDS / 2, "an error at the end is not waited for"
    (line,) = capsys.readouterr().err.splitlines()
    assert "store is http://***@host:5000" in line
    assert "Type MLFLOW_TRACKING_URI=URL" in line
    assert f"tracking resync {tmp_path}" in line
    assert tracker.is_mirrored is False
    assert RunDirectory(tmp_path).mirror()["uri"] == "http://***@host:5000"


def test_run_names_tell_configurations_apart() -> None:
    def name(words: str, **changes: object) -> str:
        return mlflow.run_name(RunConfig(experiment="nvfp4_aqn", **changes), words.split())  # type: ignore[arg-type]

    plain = name("+experiment=nvfp4_aqn seed=0 run_dir=x tracking.experiment=y +sweeps=z")
    assert re.fullmatch(r"nvfp4_aqn-seed0 \[[0-9a-f]{6}\]", plain)
    assert name("+experiment=nvfp4_aqn aqn=cosine lora=rank64").startswith("nvfp4_aqn-seed0 aqn=cosine lora=rank64 [")
    assert name("", steps=7) != plain, "YAML that was edited, and no word"
    assert len(name(" ".join(["rollout.max_completion_tokens=64"] * 100))) < 140


def test_params_are_the_whole_configuration_within_mlflows_limits() -> None:
    cfg = RunConfig()
    cfg.task.instruction = "x" * 10_000
    cfg.tracking.uri = "http://user:secret@host"
    params = mlflow.params(cfg)
    assert set(params) == {name for name, _, _ in leaves(cfg)} - {"tracking.uri", "resume", "dry_run", "run_dir"}
    assert params["lora.rank"] == "32"
    assert len(params["task.instruction"]) == 6000
    assert "secret" not in "".join(params.values())


def test_tags_take_the_commit_from_the_runs_own_record(tmp_path: Path) -> None:
    cfg = RunConfig(seed=7, experiment="nvfp4_aqn")
    assert mlflow.tags(cfg, RunDirectory(tmp_path), "k")["git_sha"] == "unknown"
    (tmp_path / "env.json").write_text('{"git_sha": "abc", "dirty": true, "command": "c", "sweep": "s"}')
    tags = mlflow.tags(cfg, RunDirectory(tmp_path), "k")
    assert (tags["git_sha"], tags["dirty"], tags["command"], tags["sweep"]) == ("abc", "true", "c", "s")
    assert tags["mlflow.runName"] == f"nvfp4_aqn-seed7 [{tags['config_hash'][:6]}]"
    wanted = {"config_hash", "seed", "git_sha", "dirty", "experiment", "scale", "format", "aqn", "mlflow.runName"}
    assert wanted <= set(tags)
    assert all(isinstance(value, str) for value in tags.values())


def test_resync_refuses_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path / "a run")
    run.path.mkdir()

    def refused(code: int, *words: str) -> str:
        assert main(["resync", str(run.path), *words]) == code
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return err

    assert "has no resolved.yaml, so it is no run directory" in refused(2)
    run.claim(RunConfig(), TypedCommand("the command"))
    assert f"has no metrics.jsonl yet. Type python -m qerl_lab resume='{run.path}'." in refused(2)
    assert run.mirror() == {}
    run.begin()
    said = "error: uri=mlruns is no address of an MLflow store; allowed: sqlite:///FILE.db"
    assert refused(2, "uri=mlruns").startswith(said)
    assert "not resynced. " in (said := refused(1, "uri=htp://host"))
    assert "unsupported URI 'htp://host'" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "host:5000")
    assert refused(2).startswith("error: MLFLOW_TRACKING_URI=host:5000 is no address of an MLflow store")
    said = refused(1, "uri=sqlite:////proc/x.db")
    assert said.startswith("error: not resynced. [Errno")
    assert "Type the command again once the store answers, or add uri=STORE." in said
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert refused(2).startswith(f"error: {run.path} cannot be written. Make it writable, or copy ")


# --- Weights & Biases


class Client(types.ModuleType):
    """Fake client: keeps runs by id, and refuses a step before the last one, as the real client does."""

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
    for name in ("samples.jsonl", "eval.parquet", "curves.png", "console.txt"):
        (tmp_path / name).touch()
    for last_step, steps, status in ((0, (1, 2, 3), "KILLED"), (2, (3, 4), "FINISHED")):
        tracker = Tracker(cfg, RunDirectory(tmp_path), last_step=last_step)
        for step in steps:
            tracker.log(step, {"reward/mean": float(step)})
        tracker.finish(status, {"accuracy_after": 0.5} if status == "FINISHED" else {})
    (run,) = client.runs.values()
    assert run.id == json.loads((tmp_path / "mlflow.json").read_text())["key"]
    assert run.lines == [(step, {"reward/mean": float(step)}) for step in (1, 2, 3, 4)]
    assert (run.summary, run.exit_code) == ({"accuracy_after": 0.5}, 0)
    assert set(run.files) == {"resolved.yaml", "metrics.jsonl", "samples.jsonl", "eval.parquet", "curves.png"}
    assert client.asked["mode"] == "offline"
    assert client.asked["config"]["lora.rank"] == "32"
    assert client.asked["name"] == client.asked["config"]["tags"]["mlflow.runName"]
    assert re.fullmatch(r"\w+-seed0 \[[0-9a-f]{6}\]", client.asked["name"])
    assert tracker.is_mirrored is None


@pytest.mark.parametrize(("is_done", "exit_code"), [(False, 1), (True, 0)])
def test_an_error_ends_a_run_as_failed_unless_it_is_done(
    client: Client, tmp_path: Path, is_done: bool, exit_code: int
) -> None:
    cfg = RunConfig()
    cfg.tracking.mlflow, cfg.tracking.wandb = False, True
    write_config(tmp_path, cfg)
    if is_done:
        RunDirectory(tmp_path).finish({})
    with pytest.raises(ZeroDivisionError), Tracker(cfg, RunDirectory(tmp_path)) as tracker:
        raise ZeroDivisionError
    if is_done:
        tracker.finish("FINISHED")
    (run,) = client.runs.values()
    assert run.exit_code == exit_code


@pytest.mark.parametrize(("variables", "mode"), [
    ({}, "offline"), ({"WANDB_API_KEY": "k"}, "online"), ({"WANDB_API_KEY": "k", "WANDB_MODE": "shared"}, "shared"),
    ({"NETRC": "HERE/netrc"}, "online"), ({"NETRC": "HERE/netrc", "WANDB_BASE_URL": "https://own.host"}, "offline"),
])  # fmt: skip
def test_who_has_logged_in_is_mirrored_online(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], mode: str
) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password k\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.replace("HERE", str(tmp_path)))
    cfg = RunConfig()
    cfg.tracking.mlflow, cfg.tracking.wandb = False, True
    Tracker(cfg, RunDirectory(tmp_path)).finish("KILLED")
    assert client.asked["mode"] == mode
    (run,) = client.runs.values()
    assert run.exit_code == 130


def test_without_the_package_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    cfg = RunConfig()
    cfg.tracking.wandb = True
    with pytest.raises(ConfigError, match=r"Type pip install 'qerl-lab\[wandb\]', or tracking=mlflow\."):
        preflight.check_machine(cfg, tmp_path)
