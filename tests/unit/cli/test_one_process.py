"""Signals to a command, several processes, the GPUs that a run takes, and the messages after a failure."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qerl_lab.cli import launch
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.system.processes import rank_variables, refuse_several_processes
from qerl_lab.train import ranks

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ([0, 0], None),
        ([1, -9], 1),  # the loss of a rank makes the others exit with errors, or abort
        ([-6, -9], 1),
        ([-11, -6], 0),
        ([1, -6], 1),
        ([None, -6], 1),  # rank 0 still runs
    ],
)
def test_of_several_ended_ranks_the_cause_is_blamed(codes: list[int | None], blamed: int | None) -> None:
    assert launch._first_failed([SimpleNamespace(returncode=code) for code in codes]) == blamed


@pytest.mark.parametrize(
    ("signals", "aborts_at"),
    [
        ([(0, INT), (0.2, INT)], 0.2),
        ([(0, INT), (0.01, INT)], None),  # `timeout -s INT`
        ([(0, TERM), (0.2, INT)], 0.2),
        ([(0, HUP), (0.2, INT)], 0.2),
        ([(0, INT), (0.5, TERM), (6, TERM)], 6),  # Ctrl-C, and `tools.queue` after it
        ([(0, TERM), (0.1, TERM), (0.2, TERM), (9, TERM)], 9),
        ([(0, HUP), (0.1, HUP), (6, HUP)], None),  # a terminal, then its shell
        ([(0, INT), (6, HUP)], None),
    ],
)
def test_the_first_signal_stops_and_a_later_one_aborts_unless_it_repeats_the_first(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    signals: list[tuple[float, int]],
    aborts_at: float | None,
) -> None:
    request, aborted = launch.StopRequest(), []
    for at, number in signals:
        monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda at=at: 1000.0 + at))
        if request.receive(number):
            aborted.append(at)
    assert aborted == [at for at in [aborts_at] if at is not None]
    assert request.aborts == bool(aborted)
    assert capfd.readouterr().err.splitlines() == [launch.STOPPING, *[launch.ABORTING] * len(aborted)]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_one_of_several_processes_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}=2 is set, .* allowed: one process. Type .* srun --ntasks 1"):
        refuse_several_processes({name: "2", "SLURM_NTASKS": "2"})


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "4"},  # a shell inside salloc
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # a step of one in a larger job
        {"WORLD_SIZE": "", "LOCAL_RANK": "-1"},
    ],
)
def test_one_process_stays_allowed(environment: dict[str, str]) -> None:
    refuse_several_processes(environment)
    with pytest.raises(ConfigError, match="PMI_SIZE=2 is set"):
        refuse_several_processes(environment | {"PMI_SIZE": "2"})


def test_each_rank_of_a_run_gets_its_place_and_all_one_address() -> None:
    assert rank_variables(1) == [{}]
    first, second = rank_variables(2)
    assert {name: first[name] for name in first if first[name] != second[name]} == {"RANK": "0", "LOCAL_RANK": "0"}
    assert (second["RANK"], second["LOCAL_RANK"]) == ("1", "1")
    assert (second["WORLD_SIZE"], second["LOCAL_WORLD_SIZE"], second["MASTER_ADDR"]) == ("2", "2", "127.0.0.1")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_launcher_s_worker_is_refused_where_it_starts_the_run(torchrun: Path) -> None:
    """A job on a cluster has another environment than the command, for example with several tasks on a node."""
    run = RunDirectory(Path("run"))
    run.claim(RunConfig(), TypedCommand("the command"))
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        launch.start(run, TypedCommand("the command"))
    assert run.status == "not run"
    with pytest.raises(ConfigError, match="WORLD_SIZE=2"):
        launch.start(run)
    assert not list(torchrun.iterdir())


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A machine with `count` GPUs; torch sees the GPUs in CUDA_VISIBLE_DEVICES."""

    def make(count: int, visible: str | None) -> None:
        monkeypatch.delenv(ranks.VISIBLE, raising=False)
        if visible is not None:
            monkeypatch.setenv(ranks.VISIBLE, visible)

        def device_count() -> int:
            shown = os.environ.get(ranks.VISIBLE)
            return count if shown is None else min(count, len([name for name in shown.split(",") if name]))

        monkeypatch.setattr(torch.cuda, "device_count", device_count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")

    return make


@pytest.mark.parametrize(
    ("gpus", "count", "visible", "kept", "said"),
    [
        (1, 2, None, "0", "The run takes 1 GPU (NVIDIA H200) of the 2 visible ones: CUDA_VISIBLE_DEVICES=0. "
         "To take others, type it before the command with other numbers."),
        (2, 8, "5,2,7", "5,2", "The run takes 2 GPUs (NVIDIA H200) of the 3 visible ones: CUDA_VISIBLE_DEVICES=5,2. "
         "To take others, type it before the command with other numbers."),
        (1, 8, "3", "3", None),
        (1, 1, "0,9", "0,9", None),  # there is no GPU 9
        (1, 1, None, None, None),
        (1, 8, "", "", None),
    ],
)  # fmt: skip
def test_of_several_gpus_the_first_visible_one_is_taken(
    machine: Callable[..., None], gpus: int, count: int, visible: str | None, kept: str | None, said: str | None
) -> None:
    machine(count, visible)
    assert ranks.hide_other_gpus(gpus) == said
    assert os.environ.get(ranks.VISIBLE) == kept


@pytest.mark.parametrize(("count", "remedy"), [(0, 1), (1, 1), (3, 3)])
def test_more_gpus_than_there_are_is_an_error(machine: Callable[..., None], count: int, remedy: int) -> None:
    machine(count, None)
    said = rf"gpus=4, and {count} GPU{'' if count == 1 else 's'} can be used here\. Type gpus={remedy}, or device=cpu"
    with pytest.raises(ConfigError, match=said):
        ranks.hide_other_gpus(4)


def test_a_run_that_a_full_disk_or_a_signal_ended_is_told_how_to_continue(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    (run.path / "FAILED").touch()
    reason, _, command = launch.failure_message(run).partition("\n")
    assert reason.endswith("could not be written. Free some space, then continue with")
    assert command.endswith(f"python -m qerl_lab resume={tmp_path}")
    (run.path / "FAILED").unlink()
    run.settle(-signal.SIGKILL)
    reason, _, command = launch.failure_message(run).partition("\n")
    assert reason.endswith("as the system does when memory runs out. Continue with")
    assert command.endswith(f"python -m qerl_lab resume={tmp_path}")
    (run.path / "FAILED").write_text("ValueError: 3\n\ntrace")
    assert launch.failure_message(run) == f"failed: ValueError: 3\n{tmp_path}/FAILED has the traceback"
