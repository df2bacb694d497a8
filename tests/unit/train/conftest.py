"""Share policies and questions between the trainings of this folder, and draw no curves."""

from collections.abc import Callable

import pytest

from failing_engines import Runs
from made_once import copies
from qerl_lab.report import plots
from qerl_lab.train import run

build_policy_once = copies(run.build_policy)


@pytest.fixture(scope="module", autouse=True)
def made_once(drawn_once: pytest.MonkeyPatch) -> None:
    """Let a run copy a policy that an earlier run built, and draw no curves at its end."""
    drawn_once.setattr(run, "build_policy", build_policy_once)
    drawn_once.setattr(plots, "save_curves", lambda *_: None)


@pytest.fixture(scope="module")
def new_runs(request: pytest.FixtureRequest, tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Runs]:
    """Makes runs of the test file's SETTINGS with changes, each in a new directory."""

    def make(**changes: object) -> Runs:
        return Runs(tiny(**(request.module.SETTINGS | changes), run_dir=str(tmp_path_factory.mktemp("run"))))

    return make
