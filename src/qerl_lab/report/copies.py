"""Mark copies of a run, as when its directory was copied or its results lie beside it. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from qerl_lab.report.arms import COPIED, FINISHED, is_copy
from qerl_lab.report.runs import Record


def identity(record: Record) -> tuple[object, ...]:
    """Return what all records of one run share. Only records with a start time can be recognized as copies."""
    return record.run.arm, record.run.seed, record.origin.began


def told(records: Sequence[Record]) -> list[Record]:
    """Keep the record that got furthest of each run, and mark the others as copies.

    A run that was stopped here and finished elsewhere therefore counts once, as finished. Records with the same name
    and identity are read once.
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
