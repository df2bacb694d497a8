"""Hydra by its public names alone, and what we take for granted of them."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

from qerl_lab.cli import check

SOURCE = Path(__file__).parents[3] / "src"


def test_no_file_names_a_private_module_of_hydra() -> None:
    named = [path for path in SOURCE.rglob("*.py") if re.search(r"hydra\._|\.repository\b", path.read_text())]
    assert not named


def test_hydra_finds_our_launcher_by_itself() -> None:
    names = [f"{launcher.__module__}.{launcher.__name__}" for launcher in Plugins.instance().discover(Launcher)]
    assert names.count("hydra_plugins.qerl_lab_launcher.LabLauncher") == 1


def test_a_bug_in_the_callback_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra only warns of an Exception, and would start jobs that nobody has checked."""

    def broken() -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(check, "GlobalHydra", SimpleNamespace(instance=broken))
    with pytest.raises(check.PastHydra):
        check.CheckJobs().on_multirun_start(
            OmegaConf.create({"hydra": {"runtime": {"choices": {"hydra/launcher": "lab"}}}})
        )
