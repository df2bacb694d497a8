"""A run of two ranks on the CPU, started by the command, equals a run of one process on the same draws.

The one process samples for both ranks in turn, each with the seed of its rank. Otherwise it is an ordinary run.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import psutil
import pytest
import torch
from safetensors.torch import load_file

from failing_engines import command as failing
from qerl_lab import rollout, tasks
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.accuracy import by_question, evaluate
from qerl_lab.model import policy
from qerl_lab.model.policy import save_adapter
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import PHASES
from qerl_lab.rollout.engine import Engine, Rollout, Sampling
from qerl_lab.train.step import sampling_settings
from repeated import files_of, last_step, lines_of
from trained import train
from waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow]

STEPS, RANKS = 4, 2
SETTINGS = {
    "steps": STEPS, "checkpoint__every": 1, "optim__learning_rate": 0.02, "rollout__max_completion_tokens": 40,
    "eval__questions": 4, "eval__samples": 1, "aqn__schedule": "linear", "aqn__reading": "equation",
    "aqn__sigma_start": 0.05, "aqn__sigma_end": 0.01, "aqn__stages": 2, "aqn__probe_prompts": 0,
    "algorithm__name": "dapo", "algorithm__mask_truncated": True, "algorithm__beta": 0.05,
    "algorithm__entropy_coef": 0.2,
}  # fmt: skip


class BothRanks:
    """An engine that samples each rank's share of the questions with that rank's seed."""

    def __init__(self, engine: Engine, cfg: RunConfig) -> None:
        self.engine, self.cfg = engine, cfg
        self.sync, self.norms = engine.sync, engine.norms

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, how: Sampling) -> Rollout:
        step, share = how.seed - self.cfg.seed * 1_000_003, len(prompt_ids_P) // RANKS
        parts = [
            self.engine.generate(
                prompt_ids_P[rank * share : (rank + 1) * share], group_size, sampling_settings(self.cfg, step, 0, rank)
            )
            for rank in range(RANKS)
        ]
        groups = [group for part in parts for group in part.completions_P_G]
        return Rollout(prompt_ids_P, groups, seconds=sum(part.seconds for part in parts))


def command(run_dir: Path) -> subprocess.Popen[str]:
    """Start the command, which starts the ranks, and return its process."""
    words = [sys.executable, "-m", "qerl_lab", f"resume={run_dir}"]
    return subprocess.Popen(words, cwd=run_dir.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(run_dir: Path) -> None:
    process = command(run_dir)
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, output + errors


def stop_after(run_dir: Path, step: int, stop: Callable[[subprocess.Popen[str]], object]) -> tuple[int, str]:
    """Start the run, stop it once the step is logged, and return exit code and output."""
    process = command(run_dir)
    wait_for(lambda: last_step(run_dir) >= step, alive=lambda: process.poll() is None)
    ranks = psutil.Process(process.pid).children(
        recursive=True
    )  # listed now, because orphans have no parent to find them by
    assert len(ranks) >= RANKS
    stop(process)
    output, errors = process.communicate(timeout=300)
    assert not [rank for rank in ranks if rank.is_running()], "a rank outlives the command"
    return process.returncode, output + errors


def kill_rank_1(process: subprocess.Popen[str]) -> None:
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == RANKS
    (second,) = (rank for rank in ranks if rank.environ()["RANK"] == "1")
    second.kill()


@pytest.fixture(scope="module")
def two(new_run) -> Path:
    """Return the directory of a finished run of two ranks without interruptions."""
    run_dir = new_run(**SETTINGS, gpus=RANKS)
    finish(run_dir)
    return run_dir


def test_two_ranks_equal_one_process_on_the_same_draws(two: Path, tiny, tmp_path) -> None:
    """Every completion is drawn, trained on and counted once."""
    torch.set_num_threads(1)
    cfg = tiny(**SETTINGS)
    learner = policy.build(cfg, torch.device("cpu"))
    engine, task = BothRanks(rollout.build(cfg, learner), cfg), tasks.load(cfg.task)
    halves = [evaluate(engine.engine, learner, task, cfg, part, 1) for part in (range(2), range(2, 4))]
    pd.testing.assert_frame_equal(RunDirectory(two).evaluations()["before"], by_question(pd.concat(halves)))
    run = train(cfg, learner, engine, tmp_path)

    logged = [(step, metrics) for step, metrics in lines_of(two) if "reward/mean" in metrics]
    assert [step for step, _ in logged] == run.numbers == [1, 2, 3, 4]
    for (_, found), expected in zip(logged, run.steps, strict=True):
        assert set(found) <= set(expected)
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-3, abs=1e-6)
    save_adapter(learner.model, tmp_path / "adapter")
    expected, found = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (tmp_path, two))
    fresh = policy.build(cfg, torch.device("cpu"))
    save_adapter(fresh.model, tmp_path / "fresh" / "adapter")
    start = load_file(tmp_path / "fresh" / "adapter" / "adapter_model.safetensors")
    apart, moved = (
        torch.cat([(weight - other[name]).flatten() for name, weight in expected.items()]).norm().item()
        for other in (found, start)
    )
    assert moved > 1, "nothing was learned"
    assert apart < 1e-3 * moved


def test_the_record_of_two_ranks_is_like_the_record_of_one_process(two: Path) -> None:
    assert [step for step, _ in lines_of(two)] == [0, 1, 2, 3, 4, 4]
    assert json.loads((two / "DONE").read_text())["steps"] == STEPS
    for line in RunDirectory(two).metrics():
        if step := line["metrics"].get("step/seconds"):
            phases = [line["metrics"][f"seconds/{name}"] for name in (*PHASES, "wait")]
            assert min(phases) >= 0
            assert sum(phases) == pytest.approx(step)
    (newest,) = (two / "checkpoints").glob("step-000004")
    assert {path.name for path in newest.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    states = [torch.load(newest / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(RANKS)]
    assert not torch.equal(*states), "the ranks would have the same dropout"


def test_a_signal_stops_all_ranks_at_one_step_a_dead_rank_ends_them_and_resume_continues(new_run, two: Path) -> None:
    run_dir = new_run(**SETTINGS, gpus=RANKS)
    code, said = stop_after(run_dir, 1, lambda process: process.send_signal(signal.SIGTERM))
    assert code == 130, said
    assert "Traceback" not in said
    done = last_step(run_dir)
    assert 1 <= done < STEPS
    assert max((run_dir / "checkpoints").iterdir()).name == f"step-{done:06d}"
    assert not (run_dir / "FAILED").exists()

    code, said = stop_after(run_dir, done + 1, kill_rank_1)
    assert code == 1, said
    assert (run_dir / "FAILED").read_text().startswith("Killed: signal 9 (SIGKILL) ended rank 1 of 2")

    finish(run_dir)
    assert lines_of(run_dir) == lines_of(two)
    assert files_of(run_dir)[0] == files_of(two)[0]


def test_a_failure_in_one_rank_ends_all_ranks_and_none_waits(new_run, two: Path) -> None:
    """Rank 0 fails in the evaluation. Rank 1 fails in the evaluation, in a sync, and in a rollout of step 2."""
    run = RunDirectory(new_run(**SETTINGS | {"checkpoint__every": 0}, gpus=RANKS))
    for plan, cause, saved in (
        ("die@1@0", "rank 0: the worker died", 0),
        ("die@1@1", "rank 1: the worker died", 0),
        ("sync@2@1", "rank 1: the adapter did not arrive", 0),
        ("logprobs@2@1", "rank 1: the engine gave 0 log-probs for a completion of ", 1),
    ):
        code, output, errors = failing(run, plan)
        assert code == 1, output + errors
        assert run.reason.startswith(f"EngineFailed: {cause}")
        assert f"failed: {run.reason}" in errors
        assert "Traceback" not in errors
        assert "Traceback" in (run.path / "FAILED").read_text()
        assert f"{saved} of 4 steps are saved" in run.reason
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]

    finish(run.path)
    assert lines_of(run.path) == lines_of(two)
    assert files_of(run.path) == files_of(two)
