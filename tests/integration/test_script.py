"""The console script `qerl-lab` says its version."""

import subprocess
import sys
from pathlib import Path

import pytest

import qerl_lab

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_the_script_says_its_version(tmp_path: Path) -> None:
    """The script is as pip writes it from pyproject.toml."""
    script = tmp_path / "qerl-lab"
    script.write_text(f"#!{sys.executable}\nimport sys\nfrom qerl_lab.__main__ import command\nsys.exit(command())\n")
    script.chmod(0o755)
    done = subprocess.run([script, "--version"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"qerl-lab {qerl_lab.__version__}\n"
