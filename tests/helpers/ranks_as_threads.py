"""Ranks as threads of one process that exchange values through a shared dict."""

from threading import Barrier
from typing import Any

from qerl_lab.train.ranks import Ranks


class Threads(Ranks):
    shelf: dict[int, Any]
    meeting: Barrier

    def _gather_over_network(self, value: Any) -> list[Any]:
        self.shelf[self.rank] = value
        self.meeting.wait(30)
        told = [self.shelf[rank] for rank in range(self.size)]
        self.meeting.wait(30)
        return told


def threads(size: int) -> list[Threads]:
    """Return a `Ranks` for each thread."""
    shelf, meeting = dict[int, Any](), Barrier(size)
    made = [Threads(rank, size) for rank in range(size)]
    for ranks in made:
        vars(ranks).update(shelf=shelf, meeting=meeting)
    return made
