"""Runs that ran at once on one machine are known by their clocks, whatever their words say."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from qerl_lab.report.at_once import told
from qerl_lab.report.runs import Origin, Record
from simulated_runs import record

NOON = datetime(2026, 11, 25, 12, tzinfo=UTC).timestamp()
PLAIN = "python -m qerl_lab"


def ran(begin: float, end: float, place: str = "GPU-1", machine: str = "NVIDIA H200", command: str = PLAIN) -> Record:
    """A run from and to so many seconds after noon."""
    one = record({"device": "cuda"}, 0, 0.3)
    began = datetime.fromtimestamp(NOON + begin, UTC).isoformat(timespec="seconds")
    origin = Origin(command=command, began=began, place=place, machine=machine)
    return replace(one, run=replace(one.run, ended=NOON + end), origin=origin)


def at_once(*records: Record) -> list[int]:
    return [one.side_by_side for one in told(records)]


def test_runs_that_overlap_on_a_gpu_ran_at_once() -> None:
    assert at_once(ran(0, 100), ran(50, 150), ran(120, 200)) == [2, 2, 2]
    assert at_once(ran(0, 100), ran(10, 20), ran(30, 40), ran(35, 39)) == [3, 2, 3, 3]  # never four


def test_runs_one_after_another_ran_alone() -> None:
    """The next may begin in the second in which the last ended: starts are noted in whole ones."""
    assert at_once(ran(0, 100.4), ran(100, 200), ran(300, 400)) == [1, 1, 1]
    assert at_once(ran(0, 100), ran(98, 200)) == [2, 2]


@pytest.mark.parametrize(("places", "count"), [
    (("GPU-1", "GPU-2"), 1), (("GPU-1 GPU-2", "GPU-2"), 2), (("host", "host"), 2), (("host", "other"), 1),
])  # fmt: skip
def test_machines_are_told_apart_by_their_gpus_or_hosts(places: tuple[str, str], count: int) -> None:
    assert at_once(*(ran(0, 100, place) for place in places)) == [count, count]


def test_of_older_records_runs_by_themselves_share_machines_that_are_alike() -> None:
    old = {"place": "", "machine": "NVIDIA H200, 16 CPUs"}
    assert at_once(ran(0, 100, **old), ran(0, 100, **old)) == [2, 2]
    assert at_once(ran(0, 100, **old), ran(0, 100, **old | {"machine": "NVIDIA H200, 32 CPUs"})) == [1, 1]
    sweep = f"{PLAIN} +sweeps=weight_formats jobs=2 jobs_per_gpu=1"  # on two cards of one machine
    assert at_once(*(ran(0, 100, **old, command=sweep) for _ in range(2))) == [1, 1]
    assert at_once(*(ran(0, 100, "", "") for _ in range(2))) == [1, 1]  # nothing known


def test_a_run_that_did_not_note_its_start_is_beside_none() -> None:
    silent = ran(0, 100)
    assert at_once(replace(silent, origin=replace(silent.origin, began="")), ran(0, 100)) == [1, 1]


def test_the_larger_of_words_and_clocks_counts() -> None:
    shared = f"{PLAIN} jobs=4 jobs_per_gpu=4"
    assert at_once(ran(0, 100, command=shared), ran(200, 300, command=shared)) == [4, 4]
    alone = f"{PLAIN} +sweeps=weight_formats jobs_per_gpu=1"  # typed twice, for one card
    assert at_once(ran(0, 100, command=alone), ran(0, 100, command=alone)) == [2, 2]
