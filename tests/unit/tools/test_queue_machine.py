"""Runs of a queue on a machine: the GPU that each sees, and the packs of a run whose evaluations came late."""

import csv
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qerl_lab.cli.scheduler import GpuPool
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import Typed
from qerl_lab.tools import queue as command
from qerl_lab.tools.queue import CollectOptions, Machine, RunOptions, collect, run
from qerl_lab.tools.queue_file import Planned, write_ledger


@pytest.mark.parametrize(("gpus", "seen", "expected"), [
    (2, "", ["0", "1"]),
    (2, "4,7", ["4", "7"]),
    (1, "", [None]),
])  # fmt: skip
def test_a_run_sees_one_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int, seen: str, expected: list[str | None]) -> None:
    at_once, most = Counter[str | None](), Counter[str | None]()

    def make_on(self: Machine, one: Planned, visible: Mapping[str, str]) -> bool:
        gpu = visible.get("CUDA_VISIBLE_DEVICES")
        at_once[gpu] += 1
        most[gpu] = max(most[gpu], at_once[gpu])
        time.sleep(0.02)
        at_once[gpu] -= 1
        return True

    monkeypatch.setattr(Machine, "make_on", make_on)
    names = seen.split(",") if seen else [str(number) for number in range(gpus)]
    here = Machine(None, RunOptions(gpus=gpus, jobs=2), GpuPool(names, 2), 0.0)  # type: ignore[arg-type]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: here.make(None, 99), range(24)))  # type: ignore[arg-type]
    assert dict(most) == dict.fromkeys(expected, 2)


QUEUE = """
words: [scale=pocket, tracking=none, device=cpu]
seconds: 1
parts:
  - {name: formats, lines: ["+experiment=bf16"], seeds: [0], preregistered: false, after: ["accuracy questions=2"]}
"""


class Calls:
    """Stands in for the processes of a machine: a training run ends, an evaluation ends unless the time is up."""

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg, self.has_time, self.made = cfg, False, list[str]()

    def __call__(self, machine: Machine, one: Planned, words: Sequence[str], visible: Mapping[str, str]) -> int | None:
        folder = machine.run_folder(one)
        self.made.append(words[1])
        if words[1] == "qerl_lab":
            directory = RunDirectory(folder)
            directory.claim(self.cfg, Typed("python -m qerl_lab"))
            directory.begin()
            directory.write_environment({})
            directory.finish({"seconds": 3.0})
            folder.with_suffix(".txt").touch()
            return 0
        (folder / "evaluations" / ("one" if self.has_time else "one.partial")).mkdir(parents=True)
        return 0 if self.has_time else None


def test_a_run_is_packed_also_if_the_time_is_up_before_its_evaluations(
    tmp_path: Path, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, merged = Calls(tiny()), list[Path]()
    monkeypatch.setattr(Machine, "_call", lambda *given: calls(*given))
    monkeypatch.setattr(command, "_merge", lambda folder, found: merged.extend(found))
    (tmp_path / "queue.yaml").write_text(QUEUE)

    def on_machine(pack: str) -> dict[str, str]:
        run(RunOptions(queue=str(tmp_path / "queue.yaml"), runs=str(tmp_path / "machine"), pack=str(tmp_path / pack)))
        (row,) = [json.loads(file.read_text()) for file in tmp_path.glob("machine/*/queue.json")]
        return row

    def ledger(*packs: str) -> list[tuple[str, str]]:
        there = [str(tmp_path / pack) for pack in packs]
        collect(CollectOptions(queue=str(tmp_path / "queue.yaml"), packs=there, runs=str(tmp_path / "here")))
        with (tmp_path / "ledger.csv").open() as file:
            return [(row["state"], row["evaluations"]) for row in csv.DictReader(file)]

    assert on_machine("first")["evaluations"] == "0 of 1"
    assert ledger("first") == [("done", "0 of 1")]
    assert not list((tmp_path / "here" / merged[0].name / "evaluations").iterdir())
    calls.has_time = True
    assert on_machine("second")["evaluations"] == "1 of 1"  # by a later call on the same machine
    write_ledger(tmp_path, [])
    on_machine("third")  # packs it again
    assert calls.made == ["qerl_lab", "qerl_lab.evaluate", "qerl_lab.evaluate"]
    assert ledger("first", "third", "second") == [("done", "1 of 1")]
    assert ledger("first") == [("done", "1 of 1")]
    assert {path.name.rpartition("-")[0] for path in merged} == {"bf16-seed0"}
    assert (tmp_path / "here" / merged[0].name / "evaluations" / "one").is_dir()
