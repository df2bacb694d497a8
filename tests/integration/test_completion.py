"""The console script `qerl-lab`: its version, and tab completion in a real bash."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import qerl_lab
from qerl_lab.cli import train
from qerl_lab.config.conf_folder import choices_of

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a script as pip writes it from pyproject.toml."""
    folder = tmp_path_factory.mktemp("bin")
    path = folder / train.SCRIPT
    path.write_text(f"#!{sys.executable}\nimport sys\nfrom qerl_lab.__main__ import command\nsys.exit(command())\n")
    path.chmod(0o755)
    return folder


def bash(script: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{script}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", code], env=environment, cwd=script, capture_output=True, text=True)


def completed(script: Path, line: str) -> list[str]:
    """Return the words that bash offers after `line` and a tab."""
    words = line.split(" ")
    code = (
        f'eval "$({train.SCRIPT} -sc install=bash)"; COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)};'
        f"COMP_CWORD={len(words) - 1}; hydra_bash_completion; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    found = bash(script, code)
    assert found.stderr == ""
    return found.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        (
            "qerl-lab +experiment=nvfp4",
            {f"+experiment={arm}" for arm in choices_of("experiment") if arm.startswith("nvfp4")},
        ),
        ("qerl-lab experiment=nvfp4 scale=poc", {"scale=pocket"}),
        ("qerl-lab +sweeps=", {f"+sweeps={name}" for name in choices_of("sweeps")}),
        ("qerl-lab experiment=nvfp4 optim.le", {"optim.learning_rate="}),
    ],
)
def test_tab_completes_groups_options_and_keys(script: Path, line: str, offered: set[str]) -> None:
    assert set(completed(script, line)) == offered


def test_the_script_says_its_version(script: Path) -> None:
    assert bash(script, "qerl-lab --version").stdout == f"qerl-lab {qerl_lab.__version__}\n"
