"""Commands as processes: Ctrl-C while they import large packages, and a console that nobody reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from processes import run_module

pytestmark = pytest.mark.integration
# SIGINT comes just before `package` is imported. Imports take seconds, so a user's Ctrl-C may come then.
INTERRUPTED = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "words", "package"),
    [("qerl_lab", "seed=1", "hydra"), ("qerl_lab.quantize", "model=pocket out=made", "torch")],
)
def test_ctrl_c_during_imports_ends_a_command_with_one_line(
    module: str, words: str, package: str, tmp_path: Path
) -> None:
    code = INTERRUPTED.format(package=package, words=words.split(), module=module)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("command", ["qerl_lab --help", "qerl_lab.config tables"])
def test_a_closed_pipe_is_no_error(command: str) -> None:
    line = f"{sys.executable} -m {command} 2>&1 | head -n 0; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


@pytest.mark.parametrize("words", [["nowhere"], ["+experiment=nvfp4", "seed=1"], ["nowhere", "1"], ["run", "seed=1"]])
def test_the_process_of_a_run_refuses_everything_but_a_run_directory(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "resolved.yaml").touch()
    done = run_module("qerl_lab.train", *words, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: python -m qerl_lab.train takes RUN_DIR")
    assert "Type python -m qerl_lab with the words of a run, or resume=RUN_DIR" in done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["run", "resolved.yaml"]
