"""How many runs ran at once on one machine, by their clocks: the words of a run do not tell of others. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import NamedTuple

from qerl_lab.report.arms import is_copy
from qerl_lab.report.runs import Record

SECOND = 1  # the start is noted in whole ones


class _Stay(NamedTuple):
    """Where a run was, by all names of it, and when, in seconds since the epoch."""

    places: frozenset[str]
    begin: float
    end: float

    def meets(self, other: "_Stay") -> bool:
        return self.begin < other.end and other.begin < self.end and bool(self.places & other.places)


def told(records: Sequence[Record]) -> list[Record]:
    """The records, each with how many of all of them ran at once where it ran, itself too, at most.

    A copy of a run is no further one. Where is known by the GPUs or, without one, the host. An older record says only what the machine was like: there
    it counts for runs that no sweep started, and two machines that are alike count as one.
    """
    stays = [_stay(record) for record in records if not is_copy(record.run)]
    return [replace(record, at_once=_most(_stay(record), stays)) for record in records]


def _most(stay: _Stay, stays: Sequence[_Stay]) -> int:
    met = [other for other in stays if other.meets(stay)]
    moments = [max(other.begin, stay.begin) for other in met]
    return max((sum(other.begin <= moment < other.end for other in met) for moment in moments), default=1)


def _stay(record: Record) -> _Stay:
    """Of no length where a run did not note its start, and of no place where that is not known."""
    origin = record.origin
    begin = datetime.fromisoformat(origin.began).timestamp() if origin.began else record.run.ended
    places = set(origin.place.split())
    if not places and origin.machine and not record.has_words:
        places = {origin.machine}
    return _Stay(frozenset(places), begin, record.run.ended - SECOND)
