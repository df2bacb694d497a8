"""Runs of a queue on a machine, and collecting their packs: failures, late evaluations, bad packs."""

import errno
import hashlib
import io
import itertools
import json
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest

from qerl_lab.cli.scheduler import GpuPool
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.tools import queue as command
from qerl_lab.tools import queue_file
from qerl_lab.tools.queue import CollectOptions, Machine, RunOptions, collect, run
from qerl_lab.tools.queue_file import DONE, FAILED, Planned, read_ledger, write_ledger
from waiting import wait_for

MERGE = command._merge  # `lab` replaces it


QUEUE = """
words: [scale=pocket, tracking=none, device=cpu]
seconds: 1
parts:
  - {name: formats, lines: ["+experiment=bf16"], seeds: [0], preregistered: false, after: ["accuracy questions=2"]}
"""


def test_a_stopped_machine_ends_its_process_and_starts_no_new_one(tmp_path: Path) -> None:
    planned: Any = SimpleNamespace(key="one")
    here = Machine(None, RunOptions(runs=str(tmp_path)), GpuPool(["0"], 1), time.monotonic())  # type: ignore[arg-type]
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    assert here._call(planned, ["-c", code], {"CUDA_VISIBLE_DEVICES": "7"}) == 0
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(here._call, planned, ["-c", "import time; print(1, flush=True); time.sleep(60)"], {})
        wait_for(lambda: here.console_file(planned).read_text().endswith("1\n"))
        began = time.monotonic()
        here.stopped.set()
        assert call.result() is None
    assert time.monotonic() - began < 20
    assert here._call(planned, ["-c", "print(2)"], {}) is None
    assert here.console_file(planned).read_text() == "7\n1\n"


@pytest.mark.parametrize(("code", "last"), [
    ("try: begin()\nexcept KeyboardInterrupt: time.sleep(0.1); print('cleaned up')", "cleaned up"),
    ("signal.signal(signal.SIGINT, signal.SIG_IGN); begin()", ""),
])  # fmt: skip
def test_a_process_may_clean_up_when_the_time_is_up_and_is_killed_if_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, last: str
) -> None:
    planned: Any = SimpleNamespace(key="one")
    here = Machine(None, RunOptions(runs=str(tmp_path)), GpuPool(["0"], 1), time.monotonic())  # type: ignore[arg-type]
    console = here.console_file(planned)
    has_begun = property(lambda self: 0 if console.exists() and "\n" in console.read_text() else time.monotonic() + 9)
    monkeypatch.setattr(Machine, "until", has_begun)
    monkeypatch.setattr(command, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(command, "GRACE_SECONDS", 5.0 if last else 0.1)
    begin = "import os, signal, time\ndef begin(): print(os.getpid(), flush=True); time.sleep(20)"
    assert here._call(planned, ["-S", "-c", f"{begin}\n{code}"], {}) is None
    pid, *said = console.read_text().split("\n")
    assert last in said
    wait_for(lambda: not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE, 5)


AFTER_ITS_DIRECTORY: dict[str, int | None] = {
    "stopped": None,
    "signalled": None,
    "lost": -9,
    "interrupted": 130,
    "terminated": -15,
}


class Calls:
    """A stand-in for the processes of a machine, which are trainings and evaluations.

    The next trainings end as listed in `endings`: done, failed, refused, stopped before it began, killed before it had
    its directory, lost or ended by a signal after it had one. Later ones are done, with weights in the file `weights`
    if it is set. Evaluations end with exit code `evaluation` if the time suffices.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg, self.has_time, self.made, self.endings = cfg, False, list[str](), list[str]()
        self.evaluation: int | None = 0
        self.weights, self.seconds = "", 3.0  # of all sessions of a run
        self.packs, self.gpus = list[int](), list[str]()  # number of packs at each evaluation; the GPU of each run
        self.overrides: Sequence[str] = ()  # of the newest call
        self.answers = False  # whether evaluations write answers, with their texts

    def __call__(self, machine: Machine, one: Planned, words: Sequence[str], visible: Mapping[str, str]) -> int | None:
        folder = machine.run_folder(one)
        self.made.append(words[1])
        self.overrides = words[2:]
        if words[1] == "qerl_lab":
            self.gpus.append(visible.get("CUDA_VISIBLE_DEVICES", "all"))
            directory = RunDirectory(folder)
            ending = self.endings.pop(0) if self.endings else DONE
            if ending == "refused":
                folder.parent.mkdir()
                folder.with_suffix(".txt").write_text("asking the hub\nerror: no such model\n")
                return 2
            if ending == "killed":
                return -9
            if not directory.is_claimed:
                directory.claim(self.cfg, TypedCommand("python -m qerl_lab"))
            folder.with_suffix(".txt").touch()
            if ending == "signalled":  # as the signal handler of the command does
                machine.stopped.set()
            if ending in AFTER_ITS_DIRECTORY:
                return AFTER_ITS_DIRECTORY[ending]
            directory.begin()
            directory.write_environment({})
            if ending == FAILED:
                directory.fail("CUDA error")
                return 1
            if ending == "refused in its process":
                directory.fail("ConfigError: no such file")
                return 2
            if self.weights:
                (folder / self.weights).parent.mkdir()
                (folder / self.weights).write_bytes(b"weights")
            directory.finish({"seconds": self.seconds})
            return 0
        self.packs.append(len(list(Path(machine.options.pack).glob("*.tar.gz"))))
        (folder / "evaluations" / ("one" if self.has_time else "one.partial")).mkdir(parents=True, exist_ok=True)
        if self.answers:
            self.write_answers(folder)
        return self.evaluation if self.has_time else None

    def write_answers(self, run_dir: Path) -> None:
        answers = pd.DataFrame({"completion": ["a text"], "correct": [True]})
        answers.to_parquet(run_dir / "evaluations" / "one" / "eval.parquet", index=False)


@dataclass
class Lab:
    """The folder of a queue, and a machine with stand-ins for its processes. `merged` lists what `collect` merged."""

    folder: Path
    calls: Calls
    merged: list[tuple[str, str]]  # folder of the results, run

    def run(self, pack: str, *parts: str, **options: Any) -> str:
        """Make the remaining runs on the machine and pack them into the folder `pack`; return the error message."""
        folder = self.folder
        queue, runs = str(folder / "queue.yaml"), str(folder / "machine")
        try:
            run(RunOptions(queue=queue, runs=runs, pack=str(folder / pack), parts=list(parts), **options))
        except ConfigError:
            raise
        except ValueError as failures:  # the command then ends with exit code 1
            return str(failures)
        return ""

    def rows(self) -> list[dict[str, str]]:
        """Return the rows in the run directories of the machine."""
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("machine/*/queue.json"))]

    def collect(self, *packs: str) -> list[tuple[str, str]]:
        """Collect packs or folders of packs; return state and evaluations of the rows in the ledger."""
        there = [str(self.folder / pack) for pack in packs]
        collect(CollectOptions(queue=str(self.folder / "queue.yaml"), packs=there, runs=str(self.folder / "here")))
        return self.ledger()

    def ledger(self) -> list[tuple[str, str]]:
        return [(row["state"], row["evaluations"]) for row in read_ledger(self.folder)]


@pytest.fixture
def lab(tmp_path: Path, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch) -> Lab:
    calls, merged = Calls(tiny()), list[tuple[str, str]]()
    monkeypatch.setattr(Machine, "_call", lambda *given: calls(*given))
    monkeypatch.setattr(
        command, "_merge", lambda folder, found: merged.extend((folder.name, run.name) for run in found)
    )
    monkeypatch.setattr(time, "time", itertools.count(time.time(), 60).__next__)  # two attempts, two minutes
    monkeypatch.setattr(command, "STAGGER_SECONDS", 0.0)
    (tmp_path / "queue.yaml").write_text(QUEUE)
    return Lab(tmp_path, calls, merged)


def test_a_run_is_packed_also_if_the_time_is_up_before_its_evaluations(
    lab: Lab, capsys: pytest.CaptureFixture[str]
) -> None:
    lab.run("first")
    assert lab.rows()[0]["evaluations"] == "0 of 1"
    assert lab.calls.packs == [1], "the training is packed before it is evaluated"
    assert lab.collect("first") == [("done", "0 of 1")]
    ((_, key),) = lab.merged
    assert not list((lab.folder / "here" / key / "evaluations").iterdir())
    lab.calls.has_time = True
    capsys.readouterr()
    lab.run("second")  # a later call on the same machine
    assert lab.rows()[0]["evaluations"] == "1 of 1"
    assert capsys.readouterr().out.splitlines()[-1].startswith("next, where the results are: ")
    lab.collect("second")
    said = capsys.readouterr().out.splitlines()
    assert said == [f"0 new rows in {lab.folder}/ledger.csv, 1 replaced by packs with more",
                    f"next: python -m qerl_lab.report {lab.folder}"]  # fmt: skip
    write_ledger(lab.folder, [])
    lab.run("third")  # packs it again
    again, nothing, collecting = capsys.readouterr().out.splitlines()
    assert again == f"1 run that ended here before packed again into {lab.folder / 'third'}"
    assert nothing == "no run is left to make here"
    assert collecting.endswith(f"queue collect {lab.folder / 'queue.yaml'} 'packs=[{lab.folder / 'third'}]'")
    assert lab.calls.made == ["qerl_lab", "qerl_lab.evaluate", "qerl_lab.evaluate"]
    assert lab.collect("first", "third", "second") == [("done", "1 of 1")]
    assert lab.collect("first") == [("done", "1 of 1")]
    assert {run.rpartition("-")[0] for _, run in lab.merged} == {"bf16-seed0"}
    assert (lab.folder / "here" / key / "evaluations" / "one").is_dir()


def test_a_run_that_died_before_it_began_is_named_with_its_output(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("seeds: [0]", "seeds: [0, 1]"))
    lab.calls.endings = ["killed", "killed"]
    assert lab.run("first").startswith("2 runs failed in training or evaluation, see above: bf16-seed0-")
    *died, last = capsys.readouterr().out.splitlines()[-3:]
    for line, run_name in zip(died, ("bf16-seed0", "bf16-seed1"), strict=True):
        key, _, rest = line.partition(" ")
        assert key.startswith(run_name)
        assert rest.startswith("ended with exit code -9 before its run began; ")
        assert rest.endswith(f"/{key}.txt has its output")
    assert last.startswith("0 of 2 runs ended")


@pytest.mark.parametrize(("ending", "said", "is_failure"), [
    (FAILED, "failed: CUDA error", True),
    ("refused in its process", "failed: ConfigError: no such file", True),
    ("lost", "ended with exit code -9", True),
    ("interrupted", "was stopped by a signal", False),
    ("terminated", "was stopped by a signal", False),
    ("stopped", "was stopped when the time was up", False),
    ("signalled", "was stopped by a signal", False),
])  # fmt: skip
def test_a_run_that_failed_fails_the_command_and_one_that_was_stopped_does_not(
    lab: Lab, capsys: pytest.CaptureFixture[str], ending: str, said: str, is_failure: bool
) -> None:
    lab.calls.endings = [ending]
    failures = lab.run("first")
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("bf16-seed0"))
    key, _, how = line.partition(" ")
    assert how.startswith(f"{said}; ")
    assert failures.startswith(f"1 run failed in training or evaluation, see above: {key}.") == is_failure
    if ending == FAILED:  # the run is not repeated here before the ledger has the failure
        assert lab.run("second") == ""


@pytest.mark.parametrize(("code", "how"), [(1, "ended with exit code 1"), (None, "was stopped when the time was up")])
def test_an_evaluation_that_failed_fails_the_command(lab: Lab, capsys, code: int | None, how: str) -> None:
    lab.calls.has_time, lab.calls.evaluation = True, code
    assert bool(lab.run("first")) == (code is not None)
    assert f"is trained, and its evaluation `accuracy questions=2` {how}; " in capsys.readouterr().out


def test_all_evaluations_that_failed_are_named_and_their_run_is_counted_once(lab: Lab, capsys) -> None:
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("after: [", "after: [accuracy adapter=false, "))
    lab.calls.has_time, lab.calls.evaluation = True, 1
    assert lab.run("first").startswith("1 run failed in training or evaluation, see above: bf16-seed0")
    said = capsys.readouterr().out
    assert "its evaluation `accuracy adapter=false` ended with" in said
    assert "its evaluation `accuracy questions=2` ended with" in said


def test_packs_hold_the_answers_of_evaluations_without_their_texts(lab: Lab) -> None:
    lab.calls.has_time = lab.calls.answers = True
    lab.run("packs")
    (pack,) = lab.folder.glob("*/*.tar.gz")
    with tarfile.open(pack) as packed:
        (name,) = (name for name in packed.getnames() if name.endswith("eval.parquet"))
        file = packed.extractfile(name)
        assert file is not None
        assert {*pd.read_parquet(io.BytesIO(file.read()))} == {"correct"}


@pytest.mark.parametrize(("jobs", "part"), [(1, []), (2, ["jobs_per_gpu=2"])])
def test_a_run_beside_others_gets_its_part_of_the_gpu(lab: Lab, jobs: int, part: list[str]) -> None:
    lab.calls.endings = [FAILED, FAILED]
    lab.run("first", jobs=jobs)
    assert [word for word in lab.calls.overrides if word.startswith("jobs")] == part
    lab.collect("first")
    lab.run("second")  # now alone on its GPU
    assert [word for word in lab.calls.overrides if word.startswith("jobs")] == ["jobs_per_gpu=1"]


@pytest.mark.parametrize("file", ["adapter/adapter_model.safetensors", "model/model.safetensors"])
def test_weights_stay_on_the_machine_and_their_hash_is_in_the_row(lab: Lab, file: str) -> None:
    lab.calls.weights = file
    lab.run("first")
    (row,) = lab.rows()
    assert row["adapter_sha256"] == hashlib.sha256(b"weights").hexdigest()
    with tarfile.open(lab.folder / "first" / f"{row['run']}.tar.gz") as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert names == {"DONE", "code.diff", "env.json", "evaluations", "queue.json", "queue.txt", "resolved.yaml"}


@pytest.mark.parametrize(("minutes", "lease", "seconds", "needed"), [
    (0.9, None, 1, 1.0),  # an engine takes a minute to start
    (9, None, 600, 10.0),
    (9, 11, 600, None),
    (9, 9.5, 600, 10.0),
])  # fmt: skip
def test_a_run_begins_if_it_fits_the_lease_and_continues_in_any_case(
    lab: Lab, capsys, minutes: float, lease: float | None, seconds: int, needed: float | None
) -> None:
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("seconds: 1", f"seconds: {seconds}"))
    lab.run("first", minutes=minutes, lease=lease)
    assert (lab.calls.made[:1] == ["qerl_lab"]) == (needed is None)
    if needed is not None:
        said = f"1 run left, none started: the next needs {needed:.1f} minutes, more than minutes or lease leave"
        assert capsys.readouterr().out.splitlines()[-1] == said
        lab.calls.endings = ["stopped"]
        lab.run("second")
        lab.run("third", minutes=9, lease=lease)
        assert lab.calls.made[:2] == ["qerl_lab", "qerl_lab"]


def test_the_lease_is_counted_from_the_start_of_the_command(lab: Lab) -> None:
    """Otherwise the last run would start on a machine that is taken back before the run ends."""
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("seconds: 1", "seconds: 600"))
    queue = queue_file.read(lab.folder / "queue.yaml")
    options = RunOptions(runs=str(lab.folder / "machine"), pack=str(lab.folder), minutes=9, lease=11)
    for minutes_ago, fits in ((2, False), (0, True)):
        machine = Machine(queue, options, GpuPool(["0"], 1), time.monotonic() - 60 * minutes_ago)
        assert machine.train_and_evaluate(queue.runs[0], {}) == fits


def test_a_run_that_the_main_command_refuses_ends_the_queue_with_the_same_message(lab: Lab) -> None:
    lab.calls.endings = ["refused"]
    with pytest.raises(ConfigError, match=r"^bf16-seed0-.* was refused: error: no such model$"):
        lab.run("first")
    assert not list((lab.folder / "first").iterdir())


def test_a_run_gets_the_words_for_this_machine(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of a line win over words for the machine. Evaluations may use environment variables."""
    monkeypatch.setenv("BENCHMARKS", "/data/b")
    (lab.folder / "queue.yaml").write_text(
        QUEUE.replace("accuracy questions=2", "accuracy benchmarks=gsm8k:$BENCHMARKS")
    )
    lab.calls.endings = ["stopped"]
    lab.run("first", here="device=cuda 'task.instruction=a b'")
    assert "device=cpu" in lab.calls.overrides
    assert "task.instruction=a b" in lab.calls.overrides
    assert "device=cuda" not in lab.calls.overrides
    lab.run("second", commit="c0ffee")
    assert lab.calls.overrides[-1] == "benchmarks=gsm8k:/data/b"
    assert lab.rows()[0]["commit"] == "c0ffee"


def test_the_seconds_of_a_run_include_all_sessions_and_evaluations(lab: Lab) -> None:
    """The clock of these tests advances by a minute at each call."""
    lab.run("first")
    assert 60 <= int(lab.rows()[0]["seconds"]) < 3600
    (done,) = lab.folder.glob("machine/*/DONE")
    done.write_text('{"seconds": 86400}')
    lab.calls.has_time = True
    lab.run("second")
    assert 86400 + 60 <= int(lab.rows()[0]["seconds"]) < 86400 + 3600
    alone = QUEUE.replace(', after: ["accuracy questions=2"]', "")
    for seed, seconds, least in ((1, 3.0, 60), (2, 172800.0, 172800)):
        (lab.folder / "queue.yaml").write_text(alone.replace("[0]", f"[{seed}]"))
        lab.calls.seconds = seconds
        lab.run("without evaluations")
        assert least <= int(lab.rows()[seed]["seconds"]) < least + 3600


@pytest.mark.parametrize(
    ("gpus", "seen", "expected"), [(2, "4,7,9", {"4", "7"}), (2, "", {"0", "1"}), (1, "", {"all"})]
)
def test_runs_take_the_first_visible_gpus(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, gpus: int, seen: str, expected: set[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("seeds: [0]", "seeds: [0, 1, 2, 3]"))
    lab.run("first", gpus=gpus)
    assert len(lab.calls.gpus) == 4
    assert {*lab.calls.gpus} <= expected


def test_the_first_runs_on_each_gpu_start_one_after_the_other() -> None:
    waits = list[float]()
    stopped: Any = SimpleNamespace(wait=waits.append, is_set=lambda: True)  # and no run begins
    here = Machine(None, RunOptions(gpus=2, jobs=2), GpuPool(["0", "1"], 2), 0.0, stopped)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "train_and_evaluate", lambda *_: True)
        for number in range(6):
            here.make(None, number)  # type: ignore[arg-type]
    assert waits == [0, 0, command.STAGGER_SECONDS, command.STAGGER_SECONDS]


def test_a_preregistered_run_waits_for_its_preregistration(lab: Lab) -> None:
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("preregistered: false, ", ""))
    with pytest.raises(ConfigError, match="part formats is preregistered"):
        lab.run("first")
    assert lab.calls.made == []
    (lab.folder / "PREREGISTRATION.md").write_text("what was asked before")
    lab.run("first")
    assert lab.rows()[0]["preregistration"] == hashlib.sha256(b"what was asked before").hexdigest()[:12]


def test_a_full_disk_leaves_no_incomplete_pack(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(OSError, match="No space left"):
        lab.run("first")
    assert not list(lab.folder.glob("first/*.tar.gz"))


def test_a_failing_report_leaves_the_ledger_unchanged(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same command can then collect the same packs again."""
    lab.run("first")
    monkeypatch.setattr(command, "_merge", MERGE)
    monkeypatch.setattr(command.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=1))
    with pytest.raises(ValueError, match=r"^the report failed: -m qerl_lab\.report .*/here/bf16-seed0-.* out="):
        lab.collect("first")
    assert lab.ledger() == []


@pytest.mark.parametrize("second", [DONE, FAILED])
def test_a_failed_run_is_tried_once_more_on_its_machine(lab: Lab, second: str) -> None:
    lab.calls.endings, lab.calls.has_time = [FAILED, "stopped", second], True
    lab.run("first")
    lab.run("again")  # the failure is not collected, and its pack may be lost
    assert lab.calls.made == ["qerl_lab"]
    assert lab.collect("again") == [("failed", "0 of 1")]
    lab.run("stopped")
    assert [row["state"] for row in lab.rows()] == [FAILED], "FAILED is still there, and no second failure"
    lab.run("second")
    evaluations = "1 of 1" if second == DONE else "0 of 1"
    assert lab.collect("first", "second") == [("failed", "0 of 1"), (second, evaluations)]
    assert len(lab.merged) == (second == DONE)
    lab.run("third")
    assert lab.calls.made.count("qerl_lab") == 3
    assert not list((lab.folder / "third").iterdir())


def test_a_done_pack_replaces_a_failed_row_of_the_same_attempt(lab: Lab) -> None:
    lab.run("done")
    (row,) = lab.rows()
    write_ledger(lab.folder, [row | {"state": FAILED}])
    assert lab.collect("done") == [("done", "0 of 1")]
    assert len(lab.merged) == 1
    (lab.folder / "machine" / row["run"] / "queue.json").write_text(json.dumps(row | {"state": FAILED}))
    lab.run("failed")  # nothing is left to make
    assert lab.collect("done") == [("done", "0 of 1")]
    assert len(lab.merged) == 1


def test_a_finished_evaluation_stays_in_the_row_when_the_next_command_is_stopped(lab: Lab) -> None:
    (lab.folder / "queue.yaml").write_text(QUEUE.replace("after: [", "after: [accuracy adapter=false, "))
    lab.run("first")
    (file,) = lab.folder.glob("machine/*/queue.json")
    file.write_text(json.dumps(lab.rows()[0] | {"evaluations": "1 of 2"}))
    lab.run("second")
    assert [row["evaluations"] for row in lab.rows()] == ["1 of 2"]


def test_evaluations_of_other_parts_than_the_typed_ones_wait(lab: Lab) -> None:
    other = '  - {name: other, lines: ["+experiment=nvfp4"], seeds: [0], preregistered: false}\n'
    (lab.folder / "queue.yaml").write_text(QUEUE + other)
    lab.run("first", "formats")
    lab.collect("first")
    lab.run("second", "other")
    assert lab.calls.made == ["qerl_lab", "qerl_lab.evaluate", "qerl_lab"]
    lab.calls.has_time = True
    lab.run("third", "formats")
    assert lab.calls.made[3:] == ["qerl_lab.evaluate"]


def test_a_run_with_another_attempt_in_the_ledger_is_not_evaluated(lab: Lab) -> None:
    lab.run("first")
    write_ledger(lab.folder, [row | {"start": "on another machine"} for row in lab.rows()])
    lab.run("second")
    assert lab.calls.made == ["qerl_lab", "qerl_lab.evaluate"]
    lab.collect("first")
    assert [row["start"] for row in read_ledger(lab.folder)] == ["on another machine"]


def test_results_go_to_the_folders_of_all_parts_that_list_a_run(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    other = QUEUE.partition("parts:")[2].replace("formats", "other").replace("after", "into: the others, after")
    (lab.folder / "queue.yaml").write_text(QUEUE + other.strip("\n"))
    lab.run("first")
    capsys.readouterr()
    lab.collect("first")
    assert [folder for folder, _ in lab.merged] == [lab.folder.name, "the others"]
    said = capsys.readouterr().out.splitlines()
    assert said == [f"1 new row in {lab.folder}/ledger.csv",
                    f"next: python -m qerl_lab.report {lab.folder}",
                    f"next: python -m qerl_lab.report '{lab.folder}/the others'"]  # fmt: skip


def test_a_run_is_merged_only_into_the_folder_of_its_part(lab: Lab) -> None:
    other = '  - {name: other, lines: ["+experiment=nvfp4"], seeds: [0], preregistered: false, into: other}\n'
    (lab.folder / "queue.yaml").write_text(QUEUE + other)
    lab.run("first")
    (lab.folder / "first" / "notes.txt").write_text("no pack")
    lab.collect("first")
    assert [(folder, run.partition("-")[0]) for folder, run in lab.merged] == [
        (lab.folder.name, "bf16"), ("other", "nvfp4")
    ]  # fmt: skip


def test_bad_packs_are_left_out_and_the_others_collected(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.run("packs")
    (whole,) = (lab.folder / "packs").iterdir()
    data, (row,) = whole.read_bytes(), lab.rows()
    (lab.folder / "packs" / "0-half.tar.gz").write_bytes(data[: len(data) // 2])
    (lab.folder / "packs" / "1-text.tar.gz").write_text("no archive")
    (lab.folder / "packs" / "2-flipped.tar.gz").write_bytes(data[:-6] + b"??" + data[-4:])
    for name, changes in (("3-other", {"run": "../other"}), ("4-gone", {"run": "gone", "part": "gone"})):
        (folder := lab.folder / "odd" / name).mkdir(parents=True)
        (folder / "queue.json").write_text(json.dumps(row | changes))
        with tarfile.open(lab.folder / "packs" / f"{name}.tar.gz", "w:gz") as packed:
            packed.add(folder, changes["run"].removeprefix("../"))
    with pytest.raises(ValueError, match=r"5 packs left out, see above: .*0-half"):
        lab.collect("packs")
    said = capsys.readouterr().out
    assert "1-text.tar.gz is left out: Not a gzipped file" in said
    assert "3-other.tar.gz is left out: it is no packed record" in said
    assert "4-gone.tar.gz is left out: the queue has no part gone. Put it back to collect this pack." in said
    assert lab.ledger() == [("done", "0 of 1")]
    assert [path.name for path in (lab.folder / "here").iterdir()] == [row["run"]]
    with pytest.raises(
        ConfigError, match=r"gone\.tar\.gz is not there\. Type packs=\[FILE\.tar\.gz\] or packs=\[DIR\]"
    ):
        lab.collect("packs", "gone.tar.gz")
