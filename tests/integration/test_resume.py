"""Interruptions of a real run: signals, kill -9 at random and at the worst moments, damaged checkpoints.

Each ends in the record of a run that nobody interrupted: every metric but times, speeds and memory, bit for bit, no
step missing or double, in metrics.jsonl and in MLflow, and the same adapter.

Starting Python costs ten seconds, so most children are forked from a server that has imported everything
(multiprocessing's forkserver); what they run is the main function of `python -m qerl_lab.train`. The signals are
sent to the command itself.
"""

import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared, read_metrics

pytestmark = pytest.mark.integration

STEPS = 6
SETTINGS = {
    "steps": STEPS, "checkpoint__every": 1, "tracking__mlflow": True, "optim__learning_rate": 0.02,
    "aqn__schedule": "exponential", "aqn__unit": "kl", "aqn__kl_start": 0.02, "aqn__kl_end": 0.002, "aqn__stages": 3,
    "aqn__solver__prompts": 4, "aqn__solver__draws": 2,
    "algorithm__updates_per_rollout": 2, "algorithm__beta": 0.05, "algorithm__entropy_coef": 0.02,
    "algorithm__entropy_target": 5.0,
}  # fmt: skip
REFILLS = {
    "algorithm__dynamic_sampling": True, "algorithm__max_resamples": 3, "rollout__max_completion_tokens": 40,
    "aqn__schedule": "off",
}  # fmt: skip
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["qerl_lab.train.run", "mlflow.tracking", "mlflow.store.tracking.sqlalchemy_store"])


# --- children


def enter(run_dir: Path) -> None:
    """Put a forked child where it belongs: artifacts beside the run, output to a file of its own."""
    os.chdir(run_dir.parent)
    with (run_dir / "output.txt").open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1), os.dup2(out.fileno(), 2)


def run_to_the_end(run_dir: Path) -> None:
    enter(run_dir)
    from qerl_lab.train import __main__ as child

    sys.exit(child.main(RunDirectory(run_dir), os.getppid()))


def run_until(run_dir: Path, module: str, function: str, call: int, after: bool) -> None:
    """Die by SIGKILL at the `call`th call of a function, before or after what it does."""
    enter(run_dir)
    import importlib

    from qerl_lab.train import __main__ as child

    owner: Any = importlib.import_module(module)
    *path, name = function.split(".")
    for part in path:
        owner = getattr(owner, part)
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def deadly(*args: Any, **keywords: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*args, **keywords)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)
    sys.exit(child.main(RunDirectory(run_dir), os.getppid()))


def start(target: Callable[..., None], *args: object) -> multiprocessing.Process:
    process = SERVER.Process(target=target, args=args)
    process.start()
    return process


def ended(process: multiprocessing.Process) -> int:
    process.join(300)
    assert process.exitcode is not None, "the run hangs"
    return process.exitcode


def finish(run_dir: Path) -> None:
    assert ended(start(run_to_the_end, run_dir)) == 0, (run_dir / "output.txt").read_text()


# --- runs and their records


def create_database(path: Path) -> None:
    from qerl_lab.tracking import mlflow

    mlflow.prepare_mlflow()
    mlflow.create_sqlite(f"sqlite:///{path}")


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs."""
    path = tmp_path_factory.mktemp("database") / "mlflow.db"
    assert ended(start(create_database, path)) == 0
    return path


@pytest.fixture(scope="module")
def new_run(tiny, database: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A run directory with its resolved.yaml, as the command line leaves it for the child."""

    def make(**changes: object) -> Path:
        run_dir = tmp_path_factory.mktemp("resume") / "run"
        run_dir.mkdir()
        store = run_dir.parent / "mlflow.db"
        shutil.copyfile(database, store)
        cfg = tiny(**(SETTINGS | {"tracking__uri": f"sqlite:///{store}", "run_dir": str(run_dir)} | changes))
        (run_dir / "resolved.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False))
        return run_dir

    return make


@dataclass(frozen=True)
class Reference:
    """The record of a run that nobody interrupted, and how long it took."""

    lines: list[tuple[int, dict[str, float]]]
    adapter: bytes
    evaluation: bytes
    samples: bytes
    seconds: float


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    units = {name: metric.unit for name, metric in declared(["format", "answer"]).items()}
    return {name: value for name, value in metrics.items() if units[name] not in ("s", "tokens/s", "GiB")}


def lines_of(run_dir: Path) -> list[tuple[int, dict[str, float]]]:
    return [(line["step"], timeless(line["metrics"])) for line in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def reference(new_run) -> Reference:
    return uninterrupted(new_run())


def uninterrupted(run_dir: Path) -> Reference:
    started = time.monotonic()
    finish(run_dir)
    seconds = time.monotonic() - started
    lines = lines_of(run_dir)
    assert [step for step, _ in lines] == [0, *range(1, STEPS + 1), STEPS]
    adapter = (run_dir / "adapter" / "adapter_model.safetensors").read_bytes()
    evaluation, samples = ((run_dir / name).read_bytes() for name in ("eval.parquet", "samples.jsonl"))
    found = Reference(lines, adapter, evaluation, samples, seconds)
    check_mlflow(run_dir, found)
    return found


def check(run_dir: Path, reference: Reference) -> None:
    """The record equals the reference's."""
    assert lines_of(run_dir) == reference.lines
    assert (run_dir / "adapter" / "adapter_model.safetensors").read_bytes() == reference.adapter
    assert (run_dir / "eval.parquet").read_bytes() == reference.evaluation
    assert (run_dir / "samples.jsonl").read_bytes() == reference.samples
    assert json.loads((run_dir / "DONE").read_text())["steps"] == STEPS
    assert not (run_dir / "FAILED").exists()
    assert not list((run_dir / "checkpoints").glob(".step-*"))
    check_mlflow(run_dir, reference)


def check_mlflow(run_dir: Path, reference: Reference) -> None:
    """One run, finished, with every point of metrics.jsonl once, times and speeds among them, and no other."""
    from qerl_lab.report.frames import read_mlflow

    curves = read_mlflow(f"sqlite:///{run_dir.parent}/mlflow.db", "qerl-lab")
    frame = curves.points
    assert frame["run_id"].nunique() == 1
    assert curves.left_out == []
    points = {(row.metric, row.step): row.value for row in frame.itertuples()}
    assert len(points) == len(frame), "a point is double"
    lines = read_metrics(run_dir)
    assert points == {(name, line["step"]): value for line in lines for name, value in line["metrics"].items()}
    assert {at[0] for at in points} >= {name for _, metrics in reference.lines for name in metrics}


def steps_logged(run_dir: Path) -> int:
    return max((step for step, _ in lines_of(run_dir)), default=-1) if (run_dir / "metrics.jsonl").exists() else -1


def wait_for(condition: Callable[[], object], alive: Callable[[], bool], seconds: float = 300) -> bool:
    """Whether the condition came true before the process ended."""
    deadline = time.monotonic() + seconds
    while alive() and time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.001)
    return False


# --- tests


def test_the_noise_is_there_and_every_part_of_the_settings_acts(reference: Reference) -> None:
    """What the equality of records in the other tests is worth."""
    steps = dict(reference.lines[1:-1])
    sigma = [steps[step]["noise/sigma"] for step in steps]
    assert 0 == sigma[0] == sigma[1] < sigma[4] == sigma[5] < sigma[2] == sigma[3]
    assert steps[3]["noise/kl_solved"] == pytest.approx(0.02, rel=0.05)
    assert steps[6]["noise/kl_solved"] == pytest.approx(0.002, rel=0.05)
    assert steps[5]["noise/std_observed"] == pytest.approx(sigma[4], rel=0.1)
    assert steps[5]["noise/std_observed"] != steps[6]["noise/std_observed"]
    assert steps[6]["policy/kl_reference"] > 0
    assert any(metrics["policy/grad_norm"] > 0 for metrics in steps.values())
    assert len({metrics["policy/entropy_nats"] for metrics in steps.values()}) == STEPS
    assert len({metrics["policy/entropy_coef"] for metrics in steps.values()}) > 2, "the bonus never adapts"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_step_saves_and_says_how_to_continue(new_run, reference, number: signal.Signals) -> None:
    """SIGINT's run is continued by the printed command, as a user would; SIGTERM saves although none is due."""
    run_dir = new_run(**({} if number == signal.SIGINT else {"checkpoint__every": 0}))
    here = run_dir.parent
    command = [sys.executable, "-m", "qerl_lab", f"resume={run_dir}"]
    process = subprocess.Popen(command, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert wait_for(lambda: steps_logged(run_dir) >= 2, lambda: process.poll() is None)
    process.send_signal(number)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors

    (said,) = re.findall(r"interrupted; (\d) of 6 steps are saved. Continue with\n +(.+)", output)
    done = steps_logged(run_dir)
    assert said[0] == str(done)
    assert 2 <= done < STEPS
    assert max((run_dir / "checkpoints").iterdir()).name == f"step-{done:06d}"
    assert lines_of(run_dir) == reference.lines[: done + 1]
    assert not (run_dir / "DONE").exists()
    assert not (run_dir / "FAILED").exists()
    if number == signal.SIGINT:
        words = shlex.split(said[1])
        subprocess.run([sys.executable, *words[1:]], cwd=here, check=True, capture_output=True, timeout=300)
    else:
        finish(run_dir)
    check(run_dir, reference)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_kill_9_at_random_moments(new_run, reference, seed: int) -> None:
    """Four times at some moment within the next steps, and once as soon as a half-written checkpoint is seen."""
    rng, run_dir = random.Random(seed), new_run()
    folder, kills = run_dir / "checkpoints", 0
    half_written = rng.randrange(1, 5)
    for turn in range(5):
        process, before = start(run_to_the_end, run_dir), steps_logged(run_dir)
        if turn == half_written:
            wait_for(lambda: any(folder.glob(".step-*")), process.is_alive)
        else:
            target = before + rng.choice([0, 1, 1])
            wait_for(lambda target=target: steps_logged(run_dir) >= target, process.is_alive)
            process.join(rng.uniform(0, min(1.0, reference.seconds / STEPS)))  # a second is a step at most
        if process.is_alive():
            process.kill()
            assert ended(process) == -signal.SIGKILL
            kills += 1
    assert kills >= 2
    finish(run_dir)
    check(run_dir, reference)


def test_kill_9_at_the_worst_moments(new_run, reference) -> None:
    """One run that dies at each of these in turn, and is continued each time."""
    run_dir = new_run(checkpoint__keep=1)
    for moment in (
        ("qerl_lab.record.mirror", "MirrorRecord.set", 1, False),  # before MLflow is asked for anything
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1, True),  # evaluated, and not yet logged
        ("qerl_lab.tracking.tracker", "Tracker.log", 1, True),  # logged
        ("qerl_lab.tracking.tracker", "Tracker.log", 1, True),  # step 1 logged, and no checkpoint of it
        ("qerl_lab.record.checkpoint", "_sha256", 3, False),  # a checkpoint without manifest
        ("qerl_lab.record.checkpoint", "_flush_to_disk", 2, False),  # a whole one that is not named yet
        ("qerl_lab.record.checkpoint", "shutil.rmtree", 2, False),  # the next, before the last one is dropped
        ("qerl_lab.aqn.found", "solve", 1, False),  # the texts for a stage's sigma are sampled
        ("qerl_lab.aqn.found", "solve", 1, True),  # the sigma is found, and nothing holds it
        ("qerl_lab.record.checkpoint", "save", 3, True),  # exactly between two steps
        (
            "qerl_lab.record.directory",
            "RunDirectory.write_evaluations",
            1,
            False,
        ),  # after the last step, nothing of the evaluation kept
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1, True),  # its rows are there, its line is not
        ("qerl_lab.report.plots", "save_curves", 1, False),  # its line is there
        ("qerl_lab.tracking.tracker", "Tracker.finish", 1, False),
        ("qerl_lab.tracking.tracker", "Tracker.finish", 1, True),  # MLflow says finished, and there is no DONE
    ):
        code = ended(start(run_until, run_dir, *moment))
        assert code == -signal.SIGKILL, (moment, (run_dir / "output.txt").read_text())
        assert not (run_dir / "DONE").exists(), moment
    finish(run_dir)
    check(run_dir, reference)


def test_kill_9_of_a_run_whose_sigma_follows_its_kl(new_run) -> None:
    changes = {
        "aqn__schedule": "adaptive", "aqn__sigma_start": 0.05, "aqn__adaptive__factor": 1.5, "steps": 3,
        "eval__questions": 0,
    }  # fmt: skip
    whole, run_dir = new_run(**changes), new_run(**changes)
    finish(whole)
    for moment in (
        ("qerl_lab.aqn.found", "adapted", 1, True),  # of step 1, of which nothing is saved
        ("qerl_lab.record.checkpoint", "save", 1, True),
        ("qerl_lab.aqn.found", "adapted", 1, False),  # of step 2
        ("qerl_lab.record.checkpoint", "_sha256", 3, False),
    ):
        assert ended(start(run_until, run_dir, *moment)) == -signal.SIGKILL, (run_dir / "output.txt").read_text()
    finish(run_dir)
    assert lines_of(run_dir) == lines_of(whole)
    assert len({metrics["noise/sigma"] for _, metrics in lines_of(whole)}) == 3
    adapter, expected = (path / "adapter" / "adapter_model.safetensors" for path in (run_dir, whole))
    assert adapter.read_bytes() == expected.read_bytes()


def test_kill_9_around_an_evaluation_during_training(new_run) -> None:
    """Before it, with its rows and without its line, with both and no checkpoint of its step; all three go on alike."""
    every = {
        "steps": 4,
        "eval__every": 2,
        "eval__subset_questions": 4,
        "checkpoint__every": 2,
        "tracking__mlflow": False,
    }
    whole, killed = new_run(**every), new_run(**every)
    finish(whole)
    for moment in (
        ("qerl_lab.train.run", "evaluate", 3, False),  # before training, step 0, step 2
        ("qerl_lab.record.directory", "RunDirectory.write_evaluations", 1, True),
        ("qerl_lab.train.trainer", "LabTrainer._save_checkpoint", 1, False),
    ):
        code = ended(start(run_until, killed, *moment))
        assert code == -signal.SIGKILL, (moment, (killed / "output.txt").read_text())
    finish(killed)
    assert lines_of(killed) == lines_of(whole)
    assert [step for step, metrics in lines_of(whole) if "eval/subset_accuracy" in metrics] == [0, 2, 4]
    for name in ("eval.parquet", "adapter/adapter_model.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_kill_9_amid_refills(new_run) -> None:
    """As a step asks for more questions, and when they are graded; then in another step."""
    whole = uninterrupted(new_run(**REFILLS))
    resamples = [int(metrics["rollout/resamples"]) for _, metrics in whole.lines[1:-1]]
    first, second = [step for step, times in enumerate(resamples) if times][:2]
    assert any(metrics["rollout/groups_dropped"] for _, metrics in whole.lines[1:-1])

    run_dir = new_run(**REFILLS)
    between = sum(1 + times for times in resamples[first:second])  # rollouts from the one step to the other
    for module, function, call, after in (
        ("qerl_lab.train.step", "sampling", sum(1 + times for times in resamples[:first]) + 2, False),
        ("qerl_lab.train.step", "grade", 2, True),
        ("qerl_lab.train.step", "sampling", between + 2, True),
    ):
        before = steps_logged(run_dir)
        assert ended(start(run_until, run_dir, module, function, call, after)) == -signal.SIGKILL
        assert steps_logged(run_dir) in (before, first, second)
    assert steps_logged(run_dir) == second
    finish(run_dir)
    check(run_dir, whole)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 64
    path.write_bytes(bytes(data))


def test_damaged_checkpoints_are_passed_over_with_a_warning(new_run, reference) -> None:
    """First the newest, then all that are left: the run goes back one step, then to its start, and ends the same."""
    run_dir = new_run()
    folder = run_dir / "checkpoints"

    def killed_at(step: int) -> list[Path]:
        """Checkpoints of a run that is killed when it has this one, the newest first."""
        process = start(run_to_the_end, run_dir)
        assert wait_for(lambda: (folder / f"step-{step:06d}").exists(), process.is_alive)
        process.kill()
        ended(process)
        return sorted(folder.glob("step-*"), reverse=True)

    first, *_ = killed_at(3)
    truncate(first / "optimizer.pt")
    second = killed_at(5)
    flip(second[0] / "adapter_model.safetensors")
    for older in second[1:]:
        (older / "trainer_state.json").unlink(missing_ok=True)
    finish(run_dir)
    output = (run_dir / "output.txt").read_text()
    for path in (first, *second):
        assert re.search(rf"warning: checkpoint {path} is damaged \(.+\); using the one before it", output)
    assert re.findall(r"continuing after step \d", output) == [f"continuing after step {int(first.name[-1]) - 1}"]
    check(run_dir, reference)


def test_a_step_that_the_record_lost_is_trained_again(new_run, reference) -> None:
    """As a crash of the machine may leave it: checkpoints are there, and the newest step's line is not."""
    run_dir = new_run()
    process = start(run_to_the_end, run_dir)
    assert wait_for(lambda: (run_dir / "checkpoints" / "step-000004").exists(), process.is_alive)
    process.kill()
    ended(process)
    path, newest = run_dir / "metrics.jsonl", int(max((run_dir / "checkpoints").glob("step-*")).name[-1])
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if json.loads(line)["step"] < newest]
    path.write_bytes(b"".join(lines) + b"\0" * 40 + b"\n")
    finish(run_dir)
    output = (run_dir / "output.txt").read_text()
    assert f"{path} lacks step {newest} (line {len(lines) + 1} is no metrics record)" in output
    assert f"training again from step {newest - 1}." in output
    (run_dir / "metrics.damaged.jsonl").unlink()
    check(run_dir, reference)
    assert json.loads((run_dir / "DONE").read_text())["seconds"] > sum(
        line["metrics"].get("step/seconds", 0) for line in read_metrics(run_dir)
    )
