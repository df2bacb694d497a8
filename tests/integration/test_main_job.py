"""The main job as a user types it: its output, its files, and its gain in accuracy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from mlflow_store import mirrored, recorded, runs
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.report.runs import read_steps
from qerl_lab.system.processes import LIBRARY_VARIABLES
from qerl_lab.tracking.mlflow import MLFLOW_ENVIRONMENT

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    here = tmp_path_factory.mktemp("main_job")
    of_tests = {*LIBRARY_VARIABLES, *MLFLOW_ENVIRONMENT, "OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in of_tests}
    command = [sys.executable, "-m", "qerl_lab", "+experiment=nvfp4_aqn", "run_dir=run"]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, timeout=560), here


def test_the_main_job_succeeds_and_prints_what_a_user_needs(job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    ran, _ = job
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for words in (
        "pocket in nvfp4 (4.50 bits a weight", "held-out accuracy", "paired 95% CI", "policy entropy", "tokens/s",
        "% rollout", "GiB peak resident", "run directory: run", "mlflow ui --backend-store-uri sqlite:///",
        "-m qerl_lab.tools.export run out=exports/run",
    ):  # fmt: skip
        assert words in ran.stdout
    assert "ETA" in ran.stderr
    assert "sigma" in ran.stderr
    for noise in ("Warning", "warning", "Traceback", "INFO", "Failed to load"):
        assert noise not in ran.stdout + ran.stderr


def test_the_main_job_learns_in_less_than_3_gb(job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Only seed 0 is run here; results/pocket has five seeds."""
    done = json.loads((job[1] / "run" / "DONE").read_text())
    assert 0.40 <= done["accuracy_before"] <= 0.60
    assert 0.15 <= done["entropy_first"] <= 0.40
    assert done["accuracy_gain"] >= 0.15
    assert done["accuracy_gain_interval"][0] > 0
    assert done["memory_rss_gib"] < 3e9 / 2**30


def test_the_record_of_the_main_job_is_complete(job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    run = job[1] / "run"
    steps = read_steps(RunDirectory(run))
    assert list(steps.index) == list(range(51))
    absent = set(declared_metrics(["format", "answer"])) - set(steps.columns)
    of_others = {"kl_reference", "weight_cut_fraction", "entropy_coef"}
    of_dapo = {name for name in absent if name.startswith(("rollout/groups_", "rollout/resample"))}
    elsewhere = {f"policy/{name}" for name in of_others} | of_dapo | {
        "memory/gpu_peak_gib", "reward/overlong", "rollout/prompts_drawn", "seconds/resample", "seconds/wait",
        "noise/kl_target", "noise/kl_solved", "noise/probes", "rollout/staleness",
    } | {name for name in absent if name.startswith("eval/subset_")}  # fmt: skip
    assert absent == elsewhere, (
        "one process without KL term, GPU, part of DAPO, sigma to find, overlap or evaluation amid the run"
    )
    assert len(of_dapo) == 5
    assert steps.loc[1:].drop(columns=[c for c in steps if c.startswith("eval/")]).notna().all().all()
    sigma, observed = steps["noise/sigma"].loc[1:], steps["noise/std_observed"].loc[1:]
    assert (sigma.iloc[:5] == 0).all()
    assert (observed.iloc[:5] == 0).all()
    assert ((observed / sigma).iloc[5:].between(0.8, 1.2)).all(), "noise accumulates, or does not reach the engine"
    assert pd.read_parquet(run / "eval.parquet").groupby("phase").size().to_dict() == {"after": 256, "before": 256}
    data = RunDirectory(run).environment()["data"]
    assert (data["training_questions"], data["heldout_questions"], len(data["training_sha256"])) == (4096, 1024, 64)
    for name in ("resolved.yaml", "env.json", "code.diff", "curves.png", "adapter/adapter_model.safetensors"):
        assert (run / name).stat().st_size > 0 or name == "code.diff"


def test_mlflow_mirrors_the_main_job(job: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    uri = f"sqlite:///{job[1]}/mlflow.db"
    assert [mirror.info.status for mirror in runs(uri)] == ["FINISHED"]
    assert mirrored(uri) == recorded(job[1] / "run")
