from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from qerl_lab.tools import queue_file
from qerl_lab.tools.queue_file import Part, Planned


@pytest.fixture(scope="module")
def composed_once() -> Iterator[None]:
    """Compose the runs of the same part and words once per file, because seven runs take a second."""
    compose, known = queue_file._runs_of_part, dict[str, list[Planned]]()

    def compose_or_copy(part: Part, words: Sequence[str], extra: Sequence[str]) -> list[Planned]:
        key = repr((part, words, extra))
        if key not in known:
            known[key] = compose(part, words, extra)
        return [replace(one) for one in known[key]]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue_file, "_runs_of_part", compose_or_copy)
        yield
