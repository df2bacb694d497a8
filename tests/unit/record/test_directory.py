"""A run's directory from its claim to its end, file by file."""

import errno
import os
import shutil
import signal
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from qerl_lab.cli.jobs import reserve_directory
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK, USAGE

TYPED = TypedCommand("python -m qerl_lab seed=3", ["seed=3", "task.path=https://***@host/a"], "adhoc/time")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A claimed directory that nobody has begun in."""
    run = RunDirectory(tmp_path / "a" / "run")
    run.claim(
        RunConfig(seed=3), TypedCommand(TYPED.command, ["seed=3", "task.path=https://me:pw-456@host/a"], TYPED.sweep)
    )
    return run


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_claim_holds_the_configuration_and_what_was_typed(run: RunDirectory) -> None:
    assert names(run.path) == {"resolved.yaml", "QUEUED"}
    assert (run.status, run.is_claimed, run.result()) == ("not run", True, {})
    assert "pw-456" not in (run.path / "QUEUED").read_text()
    assert (run.metrics_from(7), run.evaluations(), run.environment(), run.last_saved()) == (([], 7), {}, {}, 0)
    assert (run.config().seed, run.config().run_dir) == (3, str(run.path))
    assert run.settings()["lora.rank"] == "32"


def test_what_was_typed_is_kept_until_the_record_has_it(run: RunDirectory) -> None:
    resumed = TypedCommand("python -m qerl_lab resume=run")
    for _ in range(2):  # a run that is stopped while it loads begins again
        run.begin(resumed)
        assert (run.status, names(run.path)) == ("interrupted", {"resolved.yaml", ".typed"})
        assert run.overrides() == TYPED.words
    run.write_environment({})
    began = run.environment()
    assert TypedCommand(began["command"], began["words"], began["sweep"]) == TYPED
    assert names(run.path) == {"resolved.yaml", "env.json", "code.diff"}
    run.begin(resumed)
    run.write_environment({})
    assert names(run.path) == {"resolved.yaml", "env.json", "code.diff", "env.2.json", "code.2.diff"}
    assert [session["command"] for session in run.environments()] == [TYPED.command, resumed.command]
    assert run.overrides() == TYPED.words


def test_a_session_replaces_no_record_after_a_damaged_one_was_moved_away(run: RunDirectory) -> None:
    for command in ("first", "second", "third"):
        run.begin(TypedCommand(command))
        run.write_environment({})
        if command == "second":
            (run.path / "env.json").unlink()
    assert [session["command"] for session in run.environments()] == ["second", "third"]
    assert {"code.diff", "code.2.diff", "code.3.diff"} < names(run.path)


def test_the_sessions_of_a_run_stand_in_their_order(tmp_path: Path) -> None:
    for name in ("env.json", "env.2.json", "env.10.json", "env.9.json"):
        (tmp_path / name).write_text(f'{{"file": "{name}"}}')
    found = [session["file"] for session in RunDirectory(tmp_path).environments()]
    assert found == ["env.json", "env.2.json", "env.9.json", "env.10.json"]


def test_two_runs_never_share_a_directory(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"is not empty\. Type resume="):
        run.claim(RunConfig(seed=4), TYPED)
    with pytest.raises(ConfigError, match=r"is not empty\. Type run_dir=DIR for a new run\."):  # it holds no run
        RunDirectory(tmp_path).claim(RunConfig(seed=4), TYPED)
    with monkeypatch.context() as patch:  # both commands found nothing there
        patch.setattr(RunDirectory, "refuse_used", lambda run: None)
        with pytest.raises(FileExistsError):
            run.claim(RunConfig(seed=4), TYPED)
    assert run.config().seed == 3
    finished = RunDirectory(tmp_path / "a b")
    finished.path.mkdir()
    (finished.path / "DONE").touch()
    with pytest.raises(ConfigError, match=f"finished run. Type run_dir=DIR .* or resume='{finished.path}' steps="):
        finished.claim(RunConfig(), TYPED)


def test_of_a_refused_run_nothing_is_left_unless_it_began(run: RunDirectory) -> None:
    (run.path / "metrics.jsonl").touch()
    run.discard()
    assert names(run.path) == {"resolved.yaml", "QUEUED", "metrics.jsonl"}
    (run.path / "metrics.jsonl").unlink()
    run.discard()
    assert not run.path.exists()


def test_a_refused_run_is_taken_out_of_a_linked_folder_that_stays(tmp_path: Path) -> None:
    """An error while deleting would hide the reason of the refusal."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    run = RunDirectory(tmp_path / "link")
    run.claim(RunConfig(), TYPED)
    run.discard()
    assert names(tmp_path / "folder") == set()


def test_the_part_of_a_gpu_is_changed_only_while_nobody_else_runs_there(run: RunDirectory) -> None:
    """A lock of the old resolved.yaml does not hold for the new file, so a second process could start."""
    with run.locked(), pytest.raises(ConfigError, match="another process is running"):
        run.share_gpu(4)
    assert run.config().jobs_per_gpu == 1
    assert [run.share_gpu(jobs).jobs_per_gpu for jobs in (4, 2)] == [4, 2]
    assert run.config().jobs_per_gpu == 2


def test_two_processes_never_get_the_same_directory(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "20260131-120000"
    assert [reserve_directory(wanted).name for _ in range(3)] == [wanted.name, f"{wanted.name}-2", f"{wanted.name}-3"]


@pytest.mark.parametrize(
    ("ended_with", "code", "status", "reason"),
    [
        (INTERRUPTED, INTERRUPTED, "interrupted", None),
        (-signal.SIGTERM, INTERRUPTED, "interrupted", None),
        (-signal.SIGKILL, FAILURE, "failed", "Killed: signal 9 (SIGKILL) ended the process, as the system does"),
        (-signal.SIGSEGV, FAILURE, "failed", "Killed: signal 11 (Segmentation fault) ended the process"),
        (USAGE, FAILURE, "failed", "NoRecord: the process ended with status 2"),
        (OK, FAILURE, "failed", "NoRecord: the process ended with status 0"),
    ],
)
def test_a_process_without_a_word_is_settled(
    run: RunDirectory, ended_with: int, code: int, status: str, reason: str | None
) -> None:
    run.begin()
    assert run.settle(ended_with) == code
    assert run.status == status
    if reason:
        assert run.reason.startswith(reason)


def test_what_is_done_is_done_however_its_process_ends(run: RunDirectory) -> None:
    run.begin()
    run.finish({"seconds": 3.0})
    run.fail("RuntimeError: of a rank that came too late")
    assert (run.settle(-signal.SIGKILL), run.status, run.result()) == (OK, "done", {"seconds": 3.0})


def test_a_run_killed_while_it_is_extended_is_not_done_with_steps_that_it_lacks(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run could be neither continued nor extended."""

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    run.begin()
    longer = replace(run.config(), steps=4, extended=[2])
    for owner, change in ((Path, "rename"), (RunDirectory, "_replace_config")):
        run.finish({"steps": 2})
        with monkeypatch.context() as patch:
            patch.setattr(owner, change, killed)
            with pytest.raises(KeyboardInterrupt):
                run.extend(longer)
        assert run.config().steps != longer.steps
    assert (run.status, names(run.path)) == ("interrupted", {"resolved.yaml", ".typed", "DONE-2"})


def test_a_killed_rank_is_the_reason_of_a_failure_and_not_the_errors_of_the_others(run: RunDirectory) -> None:
    run.begin()
    run.fail("DistBackendError: connection closed by peer")
    assert run.settle(FAILURE, "rank 0 of 2") == FAILURE
    assert run.reason.startswith("DistBackendError")
    assert run.settle(-signal.SIGKILL, "rank 1 of 2") == FAILURE
    assert run.reason.startswith("Killed: signal 9 (SIGKILL) ended rank 1 of 2")
    assert run.settle(-signal.SIGTERM, "rank 1 of 2") == INTERRUPTED
    assert run.status == "interrupted"


def test_a_reason_of_the_run_s_own_stays(run: RunDirectory) -> None:
    run.begin()
    run.fail("ConfigError: no such model\n\ntrace")
    assert run.settle(USAGE) == USAGE
    assert run.settle(FAILURE) == FAILURE
    assert run.settle(-signal.SIGSEGV) == FAILURE, "it died while it left"
    assert (run.status, run.reason) == ("failed", "ConfigError: no such model")
    run.begin()
    assert run.status == "interrupted", "a run that goes on has not failed"
    shutil.rmtree(run.path)
    run.fail("FileNotFoundError: metrics.jsonl")
    assert run.reason == "FileNotFoundError: metrics.jsonl"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_failed_empty_and_the_reason_on_the_screen(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        run.fail("OSError: No space left on device\n\ntrace")
    assert run.settle(FAILURE) == FAILURE
    assert run.status == "failed"
    assert run.reason == f"the disk of {run.path} was full, so the reason could not be written"
    assert capsys.readouterr().err == "OSError: No space left on device\n"
    assert names(run.path) == {"resolved.yaml", "QUEUED", "FAILED"}


def test_settings_are_read_of_another_version_too(run: RunDirectory) -> None:
    path = run.path / "resolved.yaml"
    path.write_text(path.read_text().replace("  rank: 32\n", "  rnk: 7\n"))
    assert run.settings()["lora.rnk"] == "7"
    with pytest.raises(ConfigError, match=r"lora\.rnk is not a known key"):
        run.config()


def test_a_damaged_line_is_named_by_its_place_in_the_file(tmp_path: Path) -> None:
    whole = b'{"step": 1, "time": 1.0, "metrics": {}}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + whole + b"no record\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 3, is not"):
        RunDirectory(tmp_path).metrics_from(len(whole))


def test_the_seconds_of_a_run_are_those_of_all_its_sessions(tmp_path: Path) -> None:
    """Session 1 is killed after its line at 130 s, session 2 before it logs; session 3 ends."""
    run = RunDirectory(tmp_path)
    run.begin_session(100.0)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 130.0, "metrics": {}}\n{"st')
    run.begin_session(200.0)
    run.begin_session(time.time() - 5)
    assert run.end_session() == pytest.approx(30 + 0 + 5, abs=1)
    assert run.sessions()[:2] == [[100.0, 130.0], [200.0, 200.0]]
    assert run.first_day() == date.fromtimestamp(100)
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "time": {time.time() + 50}, "metrics": {{}}}}\n')
    run.begin_session(time.time() - 2)
    assert run.end_session() == pytest.approx(30 + 0 + 5 + 2, abs=1)


def test_a_copied_directory_gets_a_new_mirror_key_and_a_moved_one_keeps_it(run: RunDirectory) -> None:
    run.note_mirror(uri="http://host", run_id="1")
    first = run.mirror()
    copy = RunDirectory(shutil.copytree(run.path, run.path.parent / "copy"))
    (run.path.parent / "link").symlink_to(run.path)
    RunDirectory(run.path.parent / "link").note_mirror()
    copy.note_mirror()
    assert run.mirror()["key"] == first["key"] != copy.mirror()["key"]
    assert (copy.mirror()["uri"], copy.mirror().get("run_id")) == ("http://host", None)
    moved = RunDirectory(copy.path.rename(run.path.parent / "moved"))
    key = moved.mirror()["key"]
    copy.path.mkdir()
    copy.note_mirror()  # another run, where the moved one was
    moved.note_mirror()
    assert moved.mirror()["key"] == key
