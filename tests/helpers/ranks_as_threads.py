"""Ranks that are threads of one process, and tell each other over a shelf."""

from threading import Barrier
from typing import Any

from qerl_lab.train.ranks import Ranks


class Threads(Ranks):
    shelf: dict[int, Any]
    meeting: Barrier

    def _exchange(self, value: Any) -> list[Any]:
        self.shelf[self.rank] = value
        self.meeting.wait(30)
        told = [self.shelf[rank] for rank in range(self.size)]
        self.meeting.wait(30)
        return told


def threads(size: int) -> list[Threads]:
    """One for each thread."""
    shelf, meeting = dict[int, Any](), Barrier(size)
    made = [Threads(rank, size) for rank in range(size)]
    for ranks in made:
        vars(ranks).update(shelf=shelf, meeting=meeting)
    return made
