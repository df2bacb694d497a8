"""The mirror in a real MLflow store: points of a run, of a resumed run, and of `resync`."""

import shutil
import time
import types
from contextlib import suppress
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient

from mlflow_store import config, doubles, latest, log, mirrored, points, recorded, runs, track
from qerl_lab.config.arm import config_hash, leaves
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sqlite_uri
from qerl_lab.config.schema import EvalConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.line_files import Sample
from qerl_lab.tracking import mlflow as mlflow_module
from qerl_lab.tracking import tracker as tracker_module
from qerl_lab.tracking.__main__ import main
from qerl_lab.tracking.mlflow import resync
from qerl_lab.tracking.tracker import Tracker
from waiting import wait_for

pytestmark = pytest.mark.integration


def test_mlflow_receives_points_parameters_tags_files_and_numbers(run_dir: Path, db: str) -> None:
    cfg = config(run_dir, db, seed=3, experiment="nvfp4_aqn")
    (run_dir / "curves.png").write_bytes(b"png")
    tracker = Tracker(cfg, RunDirectory(run_dir))
    tracker.log(0, {"eval/accuracy": 0.5})
    log(tracker, range(1, 40))
    tracker.log(39, {"eval/accuracy": 0.75})
    RunDirectory(run_dir).append_samples([Sample(1, "7+5", "?", "12", {"answer": 1.0}, True)])
    tracker.finish("FINISHED", {"accuracy_after": 0.75, "accuracy_gain_interval": [0.1910695, 0.2933054], "steps": 39})
    (run,) = runs(db)
    assert run.info.run_id == RunDirectory(run_dir).mirror()["run_id"]
    assert run.info.status == "FINISHED"
    assert run.info.run_name.startswith("nvfp4_aqn-seed3 [")
    assert points(db, run.info.run_id) == recorded(run_dir)
    assert run.data.params == mlflow_module.params(cfg)
    assert len(run.data.params) == len(leaves(cfg)) - 4
    tags = mlflow_module.tags(cfg, RunDirectory(run_dir), RunDirectory(run_dir).mirror()["key"])
    assert tags.items() <= run.data.tags.items()
    stored = {file.path for file in MlflowClient(tracking_uri=db).list_artifacts(run.info.run_id)}
    assert stored == {"resolved.yaml", "metrics.jsonl", "samples.jsonl", "curves.png"}
    numbers = "| accuracy after | 0.75 |\n| accuracy gain interval | [0.1911, 0.2933] |\n| steps | 39 |\n"
    assert run.data.tags["mlflow.note.content"].endswith(numbers)
    (experiment,) = MlflowClient(tracking_uri=db).search_experiments(filter_string="name = 'qerl-lab'")
    assert (
        experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    )  # so that a link to the experiment opens its curves
    mirror = mlflow_module.MlflowMirror(cfg, RunDirectory(run_dir))
    MlflowClient(tracking_uri=db).set_tag(run.info.run_id, "mlflow.note.content", "look here")
    mirror.close("FINISHED", {"steps": 39}, 0.0)
    assert runs(db)[0].data.tags["mlflow.note.content"] == "look here"


def test_a_failed_run_says_why_until_it_is_continued(run_dir: Path, db: str) -> None:
    cfg = config(run_dir, db)
    with suppress(ValueError), Tracker(cfg, RunDirectory(run_dir)) as tracker:
        log(tracker, range(1, 3))
        raise ValueError("no judge at http://me:secret@host | 503\nbody")
    told = "| result | |\n|---|---|\n| reason | ValueError: no judge at http://***@host \\| 503 |\n"
    (run,) = runs(db)
    assert (run.info.status, run.data.tags["mlflow.note.content"]) == ("FAILED", told)
    track(run_dir, db, range(3, 5), "KILLED", last_step=2)
    (run,) = runs(db)
    assert (run.info.status, run.data.tags.get("mlflow.note.content")) == ("KILLED", None)
    RunDirectory(run_dir).fail("Killed: signal 9\n")
    resync(RunDirectory(run_dir))
    (run,) = runs(db)
    assert run.info.status == "FAILED"
    assert run.data.tags["mlflow.note.content"].endswith("| reason | Killed: signal 9 |\n")


def test_a_renamed_experiment_keeps_its_runs_and_a_deleted_one_is_named(run_dir: Path, db: str) -> None:
    track(run_dir, db, range(1, 3), "KILLED")
    client, (run,) = MlflowClient(tracking_uri=db), runs(db)
    client.rename_experiment(run.info.experiment_id, "november")
    assert f"found run {run.info.run_id}" in resync(RunDirectory(run_dir))
    assert client.get_experiment_by_name("qerl-lab") is None
    client.delete_experiment(client.create_experiment("qerl-lab"))
    client.delete_run(run.info.run_id)
    with pytest.raises(ConfigError, match=r"experiment qerl-lab is deleted.* restore --experiment-id \d"):
        resync(RunDirectory(run_dir))


def test_a_running_run_is_not_resynced(run_dir: Path, db: str) -> None:
    tracker = Tracker(config(run_dir, db), RunDirectory(run_dir))
    log(tracker, range(1, 3))
    wait_for(lambda: mirrored(db))
    with RunDirectory(run_dir).locked(), pytest.raises(ConfigError, match="another process is running in"):
        resync(RunDirectory(run_dir))
    assert runs(db)[0].info.status == "RUNNING"
    tracker.finish("FINISHED")


def test_the_duration_in_mlflow_covers_the_sessions(run_dir: Path, db: str) -> None:
    off, run = config(run_dir, mlflow=False), RunDirectory(run_dir)
    run.begin_session(time.time() - 60)
    log(Tracker(off, run), range(1, 3))
    run.end_session()
    resync(run, db)
    (mirror,), ((began, ended),) = runs(db), run.sessions()
    assert (mirror.info.start_time, mirror.info.end_time) == (int(began * 1000), int(ended * 1000))


def test_the_default_store_is_in_the_directory_where_the_run_was_typed(
    run_dir: Path, tmp_path: Path, empty_db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (typed_in := tmp_path / "a#b").mkdir()
    shutil.copy(empty_db, typed_in)
    monkeypatch.chdir(typed_in)
    track(run_dir, None, range(1, 3))
    assert {path.name for path in typed_in.iterdir()} == {"mlflow.db", "mlruns"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "a#b"}
    printed = RunDirectory(run_dir).mirror()["uri"]
    assert printed == sqlite_uri(typed_in / "mlflow.db")
    assert "found run" in resync(RunDirectory(run_dir), printed)
    assert points(printed, RunDirectory(run_dir).mirror()["run_id"]) == recorded(run_dir)
    assert [*(typed_in / "mlruns").rglob("metrics.jsonl")]


def test_the_end_sends_the_last_lines_without_waiting_for_a_flush(
    run_dir: Path, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_module, "FLUSH_SECONDS", 60)
    tracker = Tracker(config(run_dir, db), RunDirectory(run_dir))
    log(tracker, range(1, 3))
    wait_for(lambda: mirrored(db))
    log(tracker, range(3, 5))
    start = time.monotonic()
    tracker.finish("FINISHED")
    assert time.monotonic() - start < 10
    assert mirrored(db) == recorded(run_dir)


def test_values_that_are_not_finite_do_not_stop_the_mirror(run_dir: Path, db: str) -> None:
    tracker = Tracker(config(run_dir, db), RunDirectory(run_dir))
    tracker.log(1, {"policy/loss": float("nan"), "policy/grad_norm": float("inf")})
    tracker.log(2, {"policy/loss": 1.0})
    tracker.finish("FINISHED")
    found = [(name, step, value != value) for name, step, value, _ in mirrored(db)]
    assert found == [("policy/grad_norm", 1, True), ("policy/loss", 1, True), ("policy/loss", 2, False)]
    assert "added 0 points" in resync(RunDirectory(run_dir))


def test_a_resumed_run_continues_its_mlflow_run_without_double_points(run_dir: Path, db: str) -> None:
    track(run_dir, db, range(1, 8), "KILLED")
    first_id = runs(db)[0].info.run_id
    cfg = config(run_dir, db, cpu_threads=3)  # a changed parameter must not raise
    again = Tracker(cfg, RunDirectory(run_dir), last_step=7)
    log(again, range(8, 11))
    wait_for(lambda: runs(db)[0].info.status == "RUNNING")
    again.finish("FINISHED")
    (run,) = runs(db)
    assert run.info.run_id == first_id
    assert run.info.status == "FINISHED"
    assert doubles(db, run.info.run_id) == []
    assert points(db, run.info.run_id) == recorded(run_dir)


def test_a_step_that_is_trained_again_keeps_the_run_and_its_last_point_counts(run_dir: Path, db: str) -> None:
    """Steps 6 and 7 were mirrored before the kill, and MLflow cannot delete a point."""
    track(run_dir, db, range(1, 8), "KILLED")
    (before,) = runs(db)
    track(run_dir, db, range(6, 9), last_step=5, shift=0.5)
    (run,) = runs(db)
    assert run.info.run_id == before.info.run_id
    assert latest(mirrored(db)) == latest(recorded(run_dir))
    assert {step for _, step in doubles(db, run.info.run_id)} == {6, 7}


def test_an_extended_run_gets_its_own_mlflow_run(run_dir: Path, db: str) -> None:
    """MLflow cannot change the parameter `steps`, so the longer run needs its own MLflow run."""
    track(run_dir, db, range(1, 3), steps=2)
    short = RunDirectory(run_dir).config()
    track(run_dir, db, range(3, 5), last_step=2, steps=4, extended=[2])
    longer = RunDirectory(run_dir).config()
    old, new = sorted(runs(db), key=lambda run: int(run.data.params["steps"]))
    assert (old.data.params["steps"], new.data.params["steps"]) == ("2", "4")
    assert new.data.tags["config_hash"] == config_hash(longer) != config_hash(short)
    assert points(db, new.info.run_id) == recorded(run_dir)
    assert f"found run {new.info.run_id}, added 0 points" in resync(RunDirectory(run_dir), db)


def test_a_mirror_of_an_older_version_is_found_although_the_schema_has_a_new_key(
    run_dir: Path, db: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new key changes `config_hash`, and the MLflow run lacks its parameter."""
    with monkeypatch.context() as older:
        all_params = mlflow_module.params
        older.setattr(mlflow_module, "config_hash", lambda cfg: "0123456789ab")
        older.setattr(mlflow_module, "params", lambda cfg: {k: v for k, v in all_params(cfg).items() if k != "seed"})
        track(run_dir, db, range(1, 3), steps=2)
    (before,) = runs(db)
    assert f"found run {before.info.run_id}, added 0 points and 1 parameters" in resync(RunDirectory(run_dir), db)
    track(run_dir, db, range(3, 5), last_step=2, steps=2)
    (after,) = runs(db)
    assert after.info.run_id == before.info.run_id


def test_a_mirror_without_parameters_is_found_again(run_dir: Path, db: str) -> None:
    cfg = config(run_dir, db)
    log(Tracker(config(run_dir, mlflow=False), RunDirectory(run_dir)), range(1, 3))
    mlflow_module.prepare_mlflow()
    client = MlflowClient(tracking_uri=db)
    RunDirectory(run_dir).note_mirror()
    tags = mlflow_module.tags(cfg, RunDirectory(run_dir), RunDirectory(run_dir).mirror()["key"])
    killed = client.create_run(client.create_experiment(cfg.tracking.experiment), tags=tags)
    assert f"found run {killed.info.run_id}" in resync(RunDirectory(run_dir), db)
    assert len(runs(db)) == 1


def test_a_resumed_run_also_fills_what_mlflow_missed_before(run_dir: Path, db: str) -> None:
    log(Tracker(config(run_dir, db, mlflow=False), RunDirectory(run_dir)), range(1, 4))
    track(run_dir, db, range(4, 6), last_step=3)
    assert mirrored(db) == recorded(run_dir)
    later = Tracker(config(run_dir, db, mlflow=False), RunDirectory(run_dir), last_step=5)
    later.log(6, {"reward/mean": 1.0, "reward/std": 2.0})
    moved = RunDirectory(run_dir.rename(run_dir.parent / "moved"))
    assert "added 2 points and 0 parameters" in resync(moved), "only the missing points"
    assert mirrored(db) == recorded(moved.path)
    assert runs(db)[0].data.tags["run_dir"] == str(moved.path)


@pytest.mark.parametrize(
    ("mark", "status"), [("DONE", "FINISHED"), ("FAILED", "FAILED"), (None, "KILLED")], ids=["done", "failed", "killed"]
)
def test_a_second_resync_adds_nothing_to_the_run_that_the_first_created(
    run_dir: Path, db: str, capsys: pytest.CaptureFixture[str], mark: str | None, status: str
) -> None:
    off = config(run_dir, mlflow=False, steps=29, eval=EvalConfig(questions=0))
    log(Tracker(off, RunDirectory(run_dir)), range(1, 30))
    if mark != "DONE":  # a finished run ends with a whole line
        with (run_dir / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 30, "ti')
    if mark:
        (run_dir / mark).write_text("{}")
    total = len(recorded(run_dir))
    assert main(["resync", str(run_dir), f"uri={db}"]) == 0
    assert f"added {total} points" in capsys.readouterr().out
    (run,) = runs(db)
    before = points(db, run.info.run_id)
    assert before == recorded(run_dir)
    assert run.info.status == status
    assert run.info.start_time == int(RunDirectory(run_dir).metrics()[0]["time"] * 1000)
    assert run.info.end_time == int(RunDirectory(run_dir).metrics()[-1]["time"] * 1000)
    assert main(["resync", str(run_dir), f"uri={db}"]) == 0
    assert "found run" in (out := capsys.readouterr().out)
    assert "added 0 points and 0 parameters" in out
    assert len(runs(db)) == 1
    assert points(db, run.info.run_id) == before


def test_resync_into_another_store_and_back_makes_one_run_in_each(
    run_dir: Path, db: str, empty_db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own store is mlflow.db of the directory where it was typed, wherever `resync` is typed."""
    (place := run_dir.parent / "other").mkdir()
    other = sqlite_uri(Path(shutil.copy(empty_db, place)))
    track(run_dir, None, range(1, 4))
    (run_dir.parent / "elsewhere").mkdir()
    monkeypatch.chdir(run_dir.parent / "elsewhere")
    assert "found run" in resync(RunDirectory(run_dir))
    assert not Path("mlflow.db").exists()
    assert "created run" in resync(RunDirectory(run_dir), other)
    assert [*(place / "mlruns").rglob("metrics.jsonl")], "a store keeps its files beside it"
    assert "added 0 points" in resync(RunDirectory(run_dir), other)
    assert "found run" in resync(RunDirectory(run_dir), db)
    assert len(runs(db)) == len(runs(other)) == 1
    assert points(other, runs(other)[0].info.run_id) == mirrored(db) == recorded(run_dir)


def test_a_half_created_database_is_not_left_behind(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(tracking_uri: str) -> None:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"half of a database")
        raise KeyboardInterrupt

    monkeypatch.setattr(mlflow, "MlflowClient", killed)
    with pytest.raises(KeyboardInterrupt):
        mlflow_module.create_sqlite(f"sqlite:///{here}/not there yet/mlflow.db")
    assert [path.name for path in here.rglob("*")] == ["not there yet"]


def test_a_database_that_another_run_made_first_stays(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower(tracking_uri: str) -> types.SimpleNamespace:
        Path(tracking_uri.removeprefix("sqlite:///")).write_bytes(b"ours")
        (here / "mlflow.db").write_bytes(b"theirs")
        return types.SimpleNamespace(search_experiments=list)

    monkeypatch.setattr(mlflow, "MlflowClient", slower)
    mlflow_module.create_sqlite(f"sqlite:///{here}/mlflow.db")
    assert [(path.name, path.read_bytes()) for path in here.iterdir()] == [("mlflow.db", b"theirs")]
