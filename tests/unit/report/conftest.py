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
    """Runs the report with these words and returns what it prints; with `code=2` its standard error."""

    def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert main([*words]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return run


@pytest.fixture
def unrendered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made and not rendered, for tests that look at no picture: rendering is most of a report's time."""

    def close(figure: Figure) -> bytes:
        plt.close(figure)
        return b"unrendered"

    monkeypatch.setattr(palette, "png", close)
