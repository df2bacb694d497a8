"""Jobs that hardly differ, two commands in one directory, and sweeps that are stopped or refused."""

import signal
from pathlib import Path

import pytest

from qerl_lab import preflight
from qerl_lab.cli.train import main
from qerl_lab.config.option import ConfigError
from standin import DONE, SIGNALLED, background, seen, started

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ON_CPU = [f"seed={DONE}", "device=cpu"]


def processes() -> list[int]:
    """The process that each run below runs/ was run by at last, in the order of the runs."""
    return [seen(path.parent)["pid"] for path in sorted(Path("runs/sweeps").glob("*/*/*/seen.json"))]


@pytest.mark.usefixtures("standin")
def test_jobs_that_differ_only_in_how_they_run_are_runs_of_their_own() -> None:
    line = ["-m", "cpu_threads=1,2", *ON_CPU]
    assert main(line) == 0
    ends = sorted(Path("runs").rglob("DONE"))
    before = processes()
    ends[1].unlink()
    assert main(line) == 0
    assert sorted(Path("runs").rglob("DONE")) == ends
    assert [now == then for now, then in zip(processes(), before, strict=True)] == [True, False]


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
    assert main(["-m", "seed=10", "lora.rank=4", "hydra.sweep.dir=sweep"]) == 0


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
