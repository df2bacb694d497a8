"""Run commands of the lab in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path


def run_module(
    module: str, *words: str, cwd: Path, timeout: float = 300, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m MODULE WORDS` in the folder `cwd`, with `variables` added to the environment."""
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, timeout=timeout)
