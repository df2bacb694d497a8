"""What every training here would do again, and no test here asserts: build policies, draw questions, draw curves."""

from collections.abc import Callable

import pytest

from failing_engines import Runs
from made_once import copies
from qerl_lab.report import plots
from qerl_lab.train import run

build_policy_once = copies(run.build_policy)


@pytest.fixture(scope="module", autouse=True)
def made_once(drawn_once: pytest.MonkeyPatch) -> None:
    """A run copies a policy of its kind that another run had built, and draws no curves when it ends."""
    drawn_once.setattr(run, "build_policy", build_policy_once)
    drawn_once.setattr(plots, "save_curves", lambda *_: None)


@pytest.fixture(scope="module")
def new_runs(request: pytest.FixtureRequest, tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runs]:
    """Makes runs of the test file's SETTINGS with changes, each in a new directory."""

    def make(**changes: object) -> Runs:
        return Runs(tiny(**(request.module.SETTINGS | changes), run_dir=str(tmp_path_factory.mktemp("run"))))

    return make
