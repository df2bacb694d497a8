"""Which run is which job's where jobs hardly differ, what two commands at once do to each other, and what a directory
of somebody else may do."""

import signal
from pathlib import Path

import pytest

from qerl_lab import preflight
from qerl_lab.cli.train import main
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import module_hash
from qerl_lab.record.directory import RunDirectory
from standin import DONE, FAILS, SIGNALLED, background, seen, started

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ON_CPU = [f"seed={DONE}", "device=cpu"]


def processes() -> list[int]:
    """The process that each run below runs/ was run by at last, in the order of the runs."""
    return [seen(path.parent)["pid"] for path in sorted(Path("runs/sweeps").glob("*/*/*/seen.json"))]


@pytest.mark.parametrize(
    "words",
    [["gpus=1,2", "optim.micro_batch_size=16"], ["gpus=2,1", "optim.micro_batch_size=16"], ["cpu_threads=1,2"],
     ["checkpoint.keep=1,2", "jobs=2", "cpu_threads=1"]],
)  # fmt: skip
@pytest.mark.usefixtures("standin")
def test_jobs_that_differ_only_in_how_they_run_are_runs_of_their_own(words: list[str]) -> None:
    line = ["-m", *words, *ON_CPU]
    assert main(line) == 0
    ends = sorted(Path("runs").rglob("DONE"))
    for stopped in (1, 0):
        before = processes()
        ends[stopped].unlink()
        assert main(line) == 0
        assert sorted(Path("runs").rglob("DONE")) == ends
        assert [now == then for now, then in zip(processes(), before, strict=True)] == [stopped == 1, stopped == 0]


@pytest.mark.usefixtures("standin")
def test_a_job_for_which_no_run_is_left_is_run() -> None:
    assert main(["-m", *ON_CPU, "lora.rank=4,8", "checkpoint.keep=2"]) == 0
    before = processes()
    assert main(["-m", *ON_CPU, "lora.rank=4,8", "checkpoint.keep=3"]) == 0
    assert processes() == before
    assert main(["-m", *ON_CPU, "lora.rank=4", "checkpoint.keep=1,2"]) == 0  # the second is there, the first is not
    *same, new = processes()
    assert same == before
    assert new not in before
    *_, added = sorted(Path("runs/sweeps").glob("*/*/*/seen.json"))
    assert RunDirectory(added.parent).config().checkpoint.keep == 1


@pytest.mark.usefixtures("standin")
def test_a_damaged_run_is_not_called_done(capfd: pytest.CaptureFixture[str]) -> None:
    line = ["-m", *ON_CPU, "lora.rank=4,8"]
    assert main(line) == 0
    before = processes()
    *_, end = sorted(Path("runs").rglob("DONE"))
    end.write_text("")
    assert main(["-m", *ON_CPU, "lora.rank=4"]) == 0  # what is damaged is no job of this one
    for words in (["dry_run=true"], []):
        assert main([*line, *words]) == 2
        said = capfd.readouterr().err.splitlines()[-1]
        assert said.startswith("error: job 1 (")
        assert f"{end.absolute()} cannot be read (Expecting value: line 1 column 1 (char 0)). Put the file" in said
    end.unlink()
    assert main(line) == 0
    assert processes()[0] == before[0]
    assert end.exists()


def test_two_commands_do_not_run_in_one_directory(standin: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first = background(standin, "-m", f"seed={DONE},{SIGNALLED}", "hydra.sweep.dir=sweep")
    running = started("sweep/1-*")
    noted = Path("sweep/multirun.yaml").read_bytes()
    for _ in range(2):  # what is refused leaves nothing that lets the next one in
        assert main(["-m", "seed=5,6", "hydra.sweep.dir=sweep"]) == 2
        assert "another command runs the sweep in" in capfd.readouterr().err
    assert Path("sweep/multirun.yaml").read_bytes() == noted
    assert {path.name for path in Path("sweep").glob("*/")} == {"0-adhoc-seed0", running.name}
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode == 130
    assert main(["-m", f"seed={DONE}", "lora.rank=4", "hydra.sweep.dir=sweep"]) == 0


def test_a_sweep_that_is_stopped_when_all_is_done_is_done(standin: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The signal comes while the last job ends."""
    standin.write_text(standin.read_text() + "\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(0.5)\n")
    command = background(standin, "-m", *ON_CPU, "lora.rank=4", "hydra.sweep.dir=sweep")
    out, _ = command.communicate(timeout=120)
    assert "1 job in sweep: 1 done" in out
    assert command.returncode == 0
    assert not Path("sweep/INTERRUPTED").exists()


def test_a_sweep_that_is_refused_leaves_no_directory(
    standin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(preflight, "check", refuse)
    for words in ([], ["hydra.sweep.dir=a/sweep"]):
        assert main(["-m", *ON_CPU, "lora.rank=4,8", *words]) == 2
        assert "no room" in capfd.readouterr().err
        assert not list(Path.cwd().iterdir())


@pytest.mark.usefixtures("standin")
def test_a_module_is_named_before_a_run_goes_on_with_it_and_none_without_a_hash(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "own.py"
    module.write_text("from pathlib import Path\nPath('ran').touch()\ndef grade(texts, questions): ...\n")
    assert main([f"seed={FAILS}", "device=cpu", "run_dir=run"]) == 1
    path = Path("run/resolved.yaml")
    path.write_text(path.read_text().replace("module: null", f"module: {module}"))
    assert main(["resume=run"]) == 2
    assert "without task.module_hash" in capfd.readouterr().err
    assert not Path("ran").exists()
    path.write_text(path.read_text().replace("module_hash: null", f"module_hash: {module_hash(str(module))}"))
    assert main(["resume=run"]) == 1
    assert f"note: imports task.module={module} (SHA-256 " in capfd.readouterr().err
