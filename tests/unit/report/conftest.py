from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def figures_closed() -> Iterator[None]:
    yield
    plt.close("all")
