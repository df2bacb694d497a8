"""Names, metrics.jsonl and what MLflow would be told, without MLflow."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_lab import tracking
from qerl_lab.config import RunConfig, leaves
from qerl_lab.record import MirrorRecord, cut_metrics
from qerl_lab.tracking import METRICS, Tracker, mlflow_uri, read_metrics

PROMISED = {
    "reward": "mean std format answer zero_variance_groups",
    "policy": "entropy_nats kl_reference clip_fraction clip_fraction_low clip_fraction_high "
    "loss grad_norm learning_rate",
    "sampler": "entropy_nats logprob_gap_mean logprob_gap_max importance_ratio_mean",
    "rollout": "tokens_per_second completion_tokens truncated_fraction",
    "step": "seconds tokens_per_second",
    "seconds": "rollout reward train sync probe",
    "noise": "sigma std_observed kl_nats",
    "memory": "rss_gib gpu_peak_gib",
    "eval": "accuracy format completion_tokens entropy_nats",
}


@pytest.fixture
def cfg() -> RunConfig:
    cfg = RunConfig()
    cfg.tracking.mlflow = False
    return cfg


@pytest.fixture
def no_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def steps(run_dir: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir)]


def test_every_promised_metric_is_declared_once_with_unit_and_meaning() -> None:
    promised = [f"{area}/{name}" for area, names in PROMISED.items() for name in names.split()]
    assert list(METRICS) == promised
    assert all(m.unit and m.meaning and "|" not in m.unit + m.meaning for m in METRICS.values())
    assert len({m.meaning for m in METRICS.values()}) == len(METRICS)
    assert all(METRICS[name].unit == "nats" for name in METRICS if name.endswith("_nats"))


def test_docs_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert tracking.main(["table"]) == 0
    docs = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    heading, printed = docs.split("| metric |", 1)
    assert "| metric |" + printed == capsys.readouterr().out
    assert heading.startswith("# ")


def test_importing_tracking_imports_nothing_heavy() -> None:
    code = (
        "import sys, qerl_lab.tracking; print([m for m in ('torch', 'mlflow', 'pandas', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_round_trip_is_exact_and_keeps_lines_that_share_a_step(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, tmp_path)
    tracker.log(0, {"eval/accuracy": 0.1})
    tracker.log(1, {"reward/mean": 1 / 3, "policy/loss": -1e-30})
    tracker.log(1, {"eval/accuracy": 1})
    tracker.finish("FINISHED")
    lines = read_metrics(tmp_path)
    assert [line["metrics"] for line in lines] == [
        {"eval/accuracy": 0.1},
        {"reward/mean": 1 / 3, "policy/loss": -1e-30},
        {"eval/accuracy": 1.0},
    ]
    assert steps(tmp_path) == [0, 1, 1]
    assert lines[0]["time"] <= lines[1]["time"] <= lines[2]["time"]
    assert tracker.run_id is None


def test_a_line_is_on_disk_when_log_returns(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, tmp_path)
    tracker.log(1, {"reward/mean": 0.5})
    assert steps(tmp_path) == [1]


def test_values_that_are_not_finite_become_null_and_read_back_as_nan(cfg: RunConfig, tmp_path: Path) -> None:
    Tracker(cfg, tmp_path).log(1, {"policy/loss": math.nan, "policy/grad_norm": math.inf, "reward/mean": 2.0})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    written = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert written["metrics"] == {"policy/loss": None, "policy/grad_norm": None, "reward/mean": 2.0}
    (line,) = read_metrics(tmp_path)
    assert math.isnan(line["metrics"]["policy/loss"])
    assert math.isnan(line["metrics"]["policy/grad_norm"])


def test_unknown_metric_is_refused_with_a_hint_and_leaves_no_line(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, tmp_path)
    with pytest.raises(ValueError, match=r"reward/meen.*Did you mean reward/mean\?"):
        tracker.log(1, {"reward/std": 0.0, "reward/meen": 1.0})
    assert read_metrics(tmp_path) == []


def test_a_torn_last_line_is_not_read_and_is_cut_on_resume(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"reward/mean": float(step)})
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    start_of_3 = whole.rindex(b'{"step": 3')
    for length in range(start_of_3, len(whole)):
        path.write_bytes(whole[:length])
        assert steps(tmp_path) == [1, 2]
    resumed = Tracker(cfg, tmp_path, last_step=2)
    resumed.log(3, {"reward/mean": 30.0})
    assert [(line["step"], line["metrics"]["reward/mean"]) for line in read_metrics(tmp_path)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]


@pytest.mark.parametrize("missing", [1, 5, 30], ids=["newline", "tail", "half"])
def test_cut_removes_a_torn_line_even_of_a_step_that_is_kept(tmp_path: Path, missing: int) -> None:
    good = b'{"step": 1, "time": 1.0, "metrics": {"reward/mean": 1.0}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(good + good[:-missing])
    cut_metrics(tmp_path, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == good


def test_resume_cuts_later_steps_and_keeps_the_rest_byte_for_byte(cfg: RunConfig, tmp_path: Path) -> None:
    tracker = Tracker(cfg, tmp_path)
    for step in (0, 1, 2, 3, 4):
        tracker.log(step, {"reward/mean": float(step)})
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:3]
    Tracker(cfg, tmp_path, last_step=2)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(kept)


def test_cut_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 1.0, "metrics": {}}\n{"step": 2, "time": 1.0, "metrics": {}}\n')
    before = path.read_bytes()

    def killed(self: Path, target: Path) -> None:
        assert steps_of(self) == [1]  # all of the new file is there before the old one goes
        raise KeyboardInterrupt

    def steps_of(file: Path) -> list[int]:
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_metrics(tmp_path, 1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", ["not json\n", "[1]\n", '{"step": 1}\n', '{"step": 1, "time": 1, "metrics": 3}\n'])
def test_a_broken_line_that_is_not_the_last_is_an_error_with_its_place(tmp_path: Path, bad: str) -> None:
    good = '{"step": 1, "time": 1.0, "metrics": {}}\n'
    (tmp_path / "metrics.jsonl").write_text(good + bad + good)
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 .*is not a metrics record"):
        read_metrics(tmp_path)


def test_a_write_cut_by_a_full_disk_is_an_error(cfg: RunConfig, tmp_path: Path) -> None:
    class Full:
        name = "metrics.jsonl"

        def write(self, data: bytes) -> int:
            return len(data) - 1

    tracker = Tracker(cfg, tmp_path)
    tracker._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="disk full"):
        tracker.log(1, {"reward/mean": 0.0})


def test_finish_refuses_a_status_that_mlflow_does_not_know(cfg: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FINISHED, FAILED, KILLED"):
        Tracker(cfg, tmp_path).finish("DONE")  # type: ignore[arg-type]


def test_an_exception_ends_the_record_as_failed(cfg: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Tracker(cfg, tmp_path) as tracker:
        tracker.log(1, {"reward/mean": 1 / 0})
    assert MirrorRecord(tmp_path).values["status"] == "FAILED"
    with Tracker(cfg, tmp_path) as tracker:
        tracker.finish("KILLED")
    assert MirrorRecord(tmp_path).values["status"] == "KILLED"


def test_status_and_key_are_kept_in_mlflow_json(cfg: RunConfig, tmp_path: Path) -> None:
    Tracker(cfg, tmp_path, run_id="abc").finish("KILLED")
    first = MirrorRecord(tmp_path).values
    assert (first["status"], first["run_id"]) == ("KILLED", "abc")
    Tracker(cfg, tmp_path, run_id="from an older checkpoint")
    again = MirrorRecord(tmp_path).values
    assert (again["status"], again["run_id"], again["key"]) == (None, "abc", first["key"])


@pytest.mark.usefixtures("no_uri")
def test_uri_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg, record = RunConfig(), MirrorRecord(tmp_path)
    assert mlflow_uri(cfg, record) == f"sqlite:///{tmp_path}/mlflow.db"
    record.set(uri="sqlite:////elsewhere/mlflow.db")
    assert mlflow_uri(cfg, record) == "sqlite:////elsewhere/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://from-environment:5000")
    assert mlflow_uri(cfg, record) == "http://from-environment:5000"
    cfg.tracking.uri = "http://from-config:5000"
    assert mlflow_uri(cfg, record) == "http://from-config:5000"


def test_params_are_the_whole_configuration_within_mlflows_limits() -> None:
    cfg = RunConfig()
    cfg.task.instruction = "x" * 10_000
    cfg.tracking.uri = "http://user:secret@host"
    params = tracking._params(cfg)
    assert set(params) == {name for name, _, _ in leaves(cfg)} - {"tracking.uri", "resume", "dry_run"}
    assert params["lora.rank"] == "32"
    assert len(params["task.instruction"]) == 6000
    assert "secret" not in "".join(params.values())


def test_tags_take_the_commit_from_the_runs_own_record(tmp_path: Path) -> None:
    cfg = RunConfig(seed=7, experiment="nvfp4_aqn")
    assert tracking._tags(cfg, tmp_path, "k")["git_sha"] == "unknown"
    (tmp_path / "env.json").write_text('{"git_sha": "abc", "dirty": true}')
    tags = tracking._tags(cfg, tmp_path, "k")
    assert (tags["mlflow.runName"], tags["git_sha"], tags["dirty"]) == ("nvfp4_aqn-seed7", "abc", "true")
    wanted = {"config_hash", "seed", "git_sha", "dirty", "experiment", "scale", "format", "aqn", "mlflow.runName"}
    assert wanted <= set(tags)
    assert all(isinstance(value, str) for value in tags.values())


def test_mlflow_settings_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in tracking.MLFLOW_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    tracking.prepare_mlflow()
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"


def test_resync_of_what_is_no_run_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tracking.main(["resync", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "metrics.jsonl" in err
