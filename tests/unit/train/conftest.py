"""What every training here would do again, and no test here asserts: draw the questions, and the curves of a run."""

from collections.abc import Iterator

import pytest

from qerl_lab.config.schema import TaskConfig
from qerl_lab.report import plots
from qerl_lab.tasks import Question, arithmetic

KNOWN: dict[str, list[Question]] = {}


@pytest.fixture(scope="module", autouse=True)
def drawn_once() -> Iterator[None]:
    """The questions of a difficulty are drawn once, and a run that ends draws no curves."""
    draw = arithmetic._questions

    def questions(cfg: TaskConfig, count: int, of_heldout: bool) -> list[Question]:
        key = f"{cfg.arithmetic} {count} {of_heldout}"
        if key not in KNOWN:
            KNOWN[key] = draw(cfg, count, of_heldout)
        return list(KNOWN[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arithmetic, "_questions", questions)
        patch.setattr(plots, "save_curves", lambda *_: None)
        yield
