"""Copies of a run: its directory was copied, to another machine say, or is beside results that have it. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from qerl_lab.report.arms import COPIED, FINISHED, is_copy
from qerl_lab.report.runs import Record


def identity(record: Record) -> tuple[object, ...]:
    """What two records of one run share; none is known to share it where it was not noted when it began."""
    return record.run.arm, record.run.seed, record.origin.began


def told(records: Sequence[Record]) -> list[Record]:
    """The records, in which of each run the one that got furthest stays as it is. The others are marked as copies.

    So a run that was stopped here and went on elsewhere is one that finished, and not one of two. One that was read
    twice, by the same name, is there once.
    """
    records = list({(record.run.name, identity(record)): record for record in records}.values())
    furthest: dict[tuple[object, ...], Record] = {}
    for record in records:
        other = furthest.setdefault(identity(record), record)
        if _how_far(record) > _how_far(other):
            furthest[identity(record)] = record
    return [_marked(record, furthest[identity(record)]) if record.origin.began else record for record in records]


def _how_far(record: Record) -> tuple[bool, bool, float]:
    run = record.run
    return run.status == FINISHED, not is_copy(run), run.ended


def _marked(record: Record, furthest: Record) -> Record:
    if record is furthest:
        return record
    status = f"{COPIED} ({furthest.run.name} is the same run)"
    return Record(replace(record.run, status=status), origin=record.origin)
