from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from qerl_lab.report import palette
from qerl_lab.report.__main__ import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the report and returns its output, or its standard error if it fails."""

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make figures and do not render them, for tests that look at no picture. Rendering is most of a report's time."""

    def close(figure: Figure) -> bytes:
        plt.close(figure)
        return b"unrendered"

    monkeypatch.setattr(palette, "png", close)
