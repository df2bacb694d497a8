"""Count runs that overlapped on one machine, from their start and end times. Pure.

Times are needed because the configuration of a run says nothing about other runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from qerl_lab.report.arms import is_copy
from qerl_lab.report.runs import Record, Session

SECOND = 1  # resolution of a recorded start time


class _Stay(NamedTuple):
    """One session of a run: names of the place, and begin and end in seconds since the epoch.

    `is_sure` is False if the end is not known and only bounded by the start of the next session.
    """

    places: frozenset[str]
    begin: float
    end: float
    is_sure: bool

    def meets(self, other: "_Stay") -> bool:
        return self.begin < other.end and other.begin < self.end and bool(self.places & other.places)


def told(records: Sequence[Record]) -> list[Record]:
    """Return the records with the peak number of runs at once on their machine, themselves included.

    Copies do not count. A resumed run counts in each session; if the end of a session is not known, `perhaps_at_once`
    takes it to last until the next began. The place is the GPUs or, without one, the host. Older records know only the
    kind of machine: runs that no sweep started then count as one place if their machines are alike.
    """
    own = [_stays(record) for record in records]
    every = [stay for record, stays in zip(records, own, strict=True) if not is_copy(record.run) for stay in stays]
    sure = [stay for stay in every if stay.is_sure]
    return [
        replace(
            record,
            at_once=max((_most(stay, sure) for stay in stays if stay.is_sure), default=1),
            perhaps_at_once=max(_most(stay, every) for stay in stays),
        )
        for record, stays in zip(records, own, strict=True)
    ]


def _most(stay: _Stay, stays: Sequence[_Stay]) -> int:
    met = [other for other in stays if other.meets(stay)]
    moments = [max(other.begin, stay.begin) for other in met]
    return max((sum(other.begin <= moment < other.end for other in met) for moment in moments), default=1)


def _stays(record: Record) -> list[_Stay]:
    """List the sessions of a record. Length 0 if the start was not noted; no place if it is not known."""
    origin, ended = record.origin, record.run.ended
    if not origin.sessions:
        begin = datetime.fromisoformat(origin.began).timestamp() if origin.began else ended
        return [_stay(record, Session(begin, ended, origin.place), not origin.was_resumed)]
    nexts = [session.begin for session in origin.sessions[1:]]
    known = [
        _stay(record, session._replace(end=later if session.end is None else session.end), session.end is not None)
        for session, later in zip(origin.sessions, nexts, strict=False)
    ]
    return [*known, _stay(record, origin.sessions[-1]._replace(end=ended), True)]


def _stay(record: Record, session: Session, is_sure: bool) -> _Stay:
    places = set(session.place.split())
    if not places and record.origin.machine and not record.has_words:
        places = {record.origin.machine}
    return _Stay(frozenset(places), session.begin, (session.end or session.begin) - SECOND, is_sure)


def alone(arms: Mapping[str, Sequence[Record]]) -> list[str]:
    """Return the arms without runs that shared a machine; only these have meaningful seconds and tokens/s."""
    return [arm for arm, records in arms.items() if all(record.side_by_side == 1 for record in records)]


def notes(records: Sequence[Record]) -> list[str]:
    """Warn about runs that overlapped, or may have."""
    if any(record.is_surely_beside for record in records):
        return [f"Runs ran beside {_others(records)}: seconds and tokens/s are of shared machines, and left out."]
    if any(record.side_by_side > 1 for record in records):
        return [f"Runs may have run beside {_others(records)}, as it is not known when a resumed run paused: their "
                "seconds and tokens/s are left out."]  # fmt: skip
    return []


def _others(records: Sequence[Record]) -> str:
    most = max(record.side_by_side for record in records) - 1
    return "another" if most == 1 else f"up to {most} others"
