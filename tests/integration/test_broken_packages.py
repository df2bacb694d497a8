"""A half-installed package ends a run with one line, which says what to type."""

import importlib
import os
import re
from pathlib import Path

import pytest

from processes import run_module
from qerl_lab.config.option import ConfigError
from qerl_lab.train.__main__ import check_vllm_imports

pytestmark = pytest.mark.integration
LOADER = "libcudart.so.13: cannot open shared object file: No such file or directory"


def half_installed(site: Path, code: str) -> Path:
    """Write a vLLM package with metadata and this `code`, and return its directory."""
    package, metadata = site / "vllm", site / "vllm-0.25.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").write_text(code)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.25.0\n")
    (metadata / "top_level.txt").write_text("vllm\n")
    return package


def test_a_half_installed_vllm_is_named_in_one_line(tmp_path: Path) -> None:
    package = half_installed(tmp_path / "site", f"raise ImportError({LOADER!r})")
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(tmp_path / "site")]))
    words = ["+experiment=bf16", "rollout=transformers", "tracking=none", "run_dir=run"]
    ran = run_module("qerl_lab", *words, cwd=tmp_path, PYTHONPATH=paths)
    assert ran.returncode == 2, ran.stdout + ran.stderr
    said = f"vLLM is installed ({package}) and cannot be imported (ImportError: {LOADER}"
    (line,) = [line for line in (ran.stdout + ran.stderr).splitlines() if said in line]
    assert line.endswith("Type pip uninstall vllm, or install a vLLM that fits this torch.")
    assert "Traceback" not in ran.stdout + ran.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_any_error_of_a_missing_library_is_named(tmp_path: Path, monkeypatch, error: type[Exception]) -> None:
    package = half_installed(tmp_path / "site", "")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def broken(name: str) -> None:
        raise error(LOADER)

    monkeypatch.setattr(importlib, "import_module", broken)
    said = f"({package}) and cannot be imported ({error.__name__}: {LOADER})"
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_vllm_imports()
