"""Jobs of a sweep that run on clusters: by submitit through sbatch of a one-machine cluster, and by Ray."""

import os
from pathlib import Path

import pytest

from processes import run_module
from qerl_lab.record.directory import RunDirectory

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SLURM = Path(__file__).parents[1] / "helpers" / "one_machine_slurm"
WORDS = [
    "-m", "+experiment=bf16", "seed=0,1", "steps=1", "eval.questions=0", "rollout.prompts_per_step=2",
    "rollout.group_size=2", "checkpoint.every=0", "device=cpu", "cpu_threads=1", "tracking=none", "jobs=2",
]  # fmt: skip


@pytest.mark.parametrize(("launcher", "package", "words"), [
    ("slurm", "submitit", ["slurm=--partition=cpu --time=10"]),
    ("ray", "ray", []),
])  # fmt: skip
def test_two_jobs_run_on_a_cluster_in_one_sweep_and_are_skipped_afterwards(
    launcher: str, package: str, words: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(package)
    path = f"{SLURM}{os.pathsep}{os.environ['PATH']}"
    ran = run_module("qerl_lab", *WORDS, f"launcher={launcher}", *words, cwd=tmp_path, PATH=path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 done" in ran.stdout
    (directory,) = tmp_path.glob("runs/sweeps/adhoc/*")
    runs = [RunDirectory(directory / f"{seed}-bf16-seed{seed}") for seed in (0, 1)]
    assert [(run.status, run.config().seed) for run in runs] == [("done", 0), ("done", 1)]
    assert all("step 1/1" in run.console.read_text() for run in runs)
    again = run_module(
        "qerl_lab", *WORDS, cwd=tmp_path
    )  # here, without the cluster: the launcher is no part of a job's identity
    assert "begun before: 2 done (hydra.sweep.dir=NEW_DIR begins all again)" in again.stdout
    if launcher == "slurm":
        (script,) = directory.glob("slurm/*.submitted")
        lines = script.read_text().splitlines()
        assert {"#SBATCH --array=0-1%2", "#SBATCH --partition=cpu", "#SBATCH --time=10"} <= set(lines)
        assert not [line for line in lines if "gpus" in line]
