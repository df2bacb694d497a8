"""The model for the tests of vLLM's engines."""

from pathlib import Path

import pytest

from small_checkpoints import write_random


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("dense"))
