"""The content of env.json and code.diff, without secrets, also without git."""

import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from qerl_lab.record import environment
from qerl_lab.record.directory import RunDirectory

PLACEHOLDER = "$Format:%H$\n"  # `git archive` puts the commit there


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small git repository that the package believes to run from."""
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a.py").write_text("x = 1\n")
    git(root, "init", "-q")
    monkeypatch.setattr(environment, "CHECKOUT", root.resolve())
    return root


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def git(root: Path, *args: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=t", "-c", "user.email=t@t", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-qm", "c")
    return git(root, "rev-parse", "HEAD").strip()


def test_the_hash_of_the_code_follows_the_source_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(environment.PACKAGE, package := tmp_path / "qerl_lab")
    here = environment.code_hash()
    monkeypatch.setattr(environment, "PACKAGE", package)
    assert environment.code_hash() == here, "the same source elsewhere, without git"
    for other in ("__pycache__/a.pyc", "commit.txt", "notes.md", "aqn/.ipynb_checkpoints/noise-checkpoint.py"):
        (package / other).parent.mkdir(exist_ok=True)
        (package / other).write_text("x")
    (package / "aqn" / ".#noise.py").symlink_to("me@host.1234")  # how Emacs locks a file that it edits
    assert environment.code_hash() == here
    seen = {here}
    changed = (
        "new.py", "algorithms/groups.py", "rollout/vllm/fp4_tiles.cu", "model/pocket/model.safetensors",
        "model/pocket/tokenizer.json", "model/pocket/chat_template.jinja",
    )  # fmt: skip
    for number, name in enumerate(changed, 2):
        (package / name).write_text("x = 1\n")
        seen.add(environment.code_hash())
        assert len(seen) == number, name
    (package / "new.py").rename(package / "newer.py")
    assert environment.code_hash() not in seen


def test_git_state_follows_the_checkout(checkout: Path) -> None:
    assert environment.git_state() == ("unknown", True)  # no commit yet, and a file that none holds
    sha = commit(checkout)
    os.utime(checkout / "src" / "a.py", (1, 1))
    index = (checkout / ".git" / "index").read_bytes()
    assert environment.git_state() == (sha, False)
    assert (checkout / ".git" / "index").read_bytes() == index, "the user's own git finds it as it was, and unlocked"
    (checkout / "src" / "a.py").write_text("x = 2\n")
    assert environment.git_state() == (sha, True)
    git(checkout, "checkout", "-q", ".")
    (checkout / "src" / "new.py").write_text("y = 1\n")
    assert environment.git_state() == (sha, True)


@pytest.fixture
def not_archived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the package the commit.txt of a checkout, also if these tests run in an unpacked archive."""
    package = tmp_path / "package"
    (package / "record").mkdir(parents=True)
    (package / "commit.txt").write_text(PLACEHOLDER)
    monkeypatch.setattr(environment, "__file__", str(package / "record" / "environment.py"))


def test_the_placeholder_of_the_commit_is_in_the_package() -> None:
    held = (Path(environment.__file__).parents[1] / "commit.txt").read_text()
    assert held == PLACEHOLDER or len(held.strip()) == 40, "the second in an unpacked archive"


def test_an_unpacked_archive_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin, unpacked = tmp_path / "origin", tmp_path / "unpacked"
    root = Path(environment.__file__).parents[3]
    (origin / "src" / "qerl_lab").mkdir(parents=True)
    shutil.copy(root / ".gitattributes", origin)
    (origin / "src" / "qerl_lab" / "commit.txt").write_text(PLACEHOLDER)
    git(origin, "init", "-q")
    sha = commit(origin)
    git(origin, "archive", "-o", str(tmp_path / "code.tar"), "HEAD", "src")
    shutil.unpack_archive(tmp_path / "code.tar", unpacked, filter="data")
    monkeypatch.setattr(environment, "CHECKOUT", unpacked)
    monkeypatch.setattr(environment, "__file__", str(unpacked / "src" / "qerl_lab" / "record" / "environment.py"))
    assert environment.git_state() == (sha, False)
    assert "changes to its files are not known" in environment.code_diff()


def test_code_diff_brings_a_clean_checkout_to_what_ran(checkout: Path, run_dir: Path) -> None:
    commit(checkout)
    (checkout / "src" / "a.py").write_text("x = 2\n")
    (checkout / "src" / "new.py").write_text("y = 1\n")
    RunDirectory(run_dir).write_environment({})
    assert "# untracked: src/new.py" in (run_dir / "code.diff").read_text()
    git(checkout, "checkout", "-q", ".")
    git(checkout, "apply", str(run_dir / "code.diff"))
    assert (checkout / "src" / "a.py").read_text() == "x = 2\n"


@pytest.mark.parametrize("text", ["a = 1\n\nb = 'ü'\r\n", "a = 1", ""])
def test_code_diff_brings_the_file_of_the_user_s_task(checkout: Path, run_dir: Path, tmp_path: Path, text: str) -> None:
    commit(checkout)
    (tmp_path / "mine.py").write_bytes((text or "A_TOKEN = 'hf_" + "x" * 34 + "'\n").encode())
    RunDirectory(run_dir).write_environment({}, module=str(tmp_path / "mine.py"))
    git(checkout, "apply", str(run_dir / "code.diff"))
    made = (checkout / "mine.py").read_bytes().decode()
    assert made == text if text else ("***" in made and "xxx" not in made), "a secret stays out of the record"
    (run_dir / "env.json").unlink()
    git(checkout, "add", "mine.py")
    git(checkout, "commit", "-qm", "the file")
    RunDirectory(run_dir).write_environment({}, module=str(checkout / "mine.py"))
    assert (run_dir / "code.diff").read_text() == "", "a commit has it"


@pytest.mark.usefixtures("not_archived")
def test_a_package_installed_inside_another_repository_has_no_commit(
    checkout: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(checkout)
    inside = checkout / ".venv" / "lib"
    (inside / "src").mkdir(parents=True)
    monkeypatch.setattr(environment, "CHECKOUT", inside.resolve())
    assert environment.git_state() == ("unknown", False)
    RunDirectory(run_dir).write_environment({})
    assert (run_dir / "code.diff").read_text().startswith("# no checkout")


@pytest.mark.usefixtures("not_archived")
def test_missing_git_is_no_failure(run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    RunDirectory(run_dir).write_environment({})
    env = json.loads((run_dir / "env.json").read_text())
    assert (env["git_sha"], env["dirty"]) == ("unknown", False)


def test_environment_says_on_what_it_ran(checkout: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sha = commit(checkout)
    monkeypatch.setattr(environment.os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(environment.os, "sysconf", {"SC_PHYS_PAGES": 2**24, "SC_PAGE_SIZE": 4096}.__getitem__)
    RunDirectory(run_dir).write_environment({"training_questions": 9}, linear_backend="fp4_tiles")
    env = json.loads((run_dir / "env.json").read_text())
    assert (env["data"], env["linear_backend"]) == ({"training_questions": 9}, "fp4_tiles")
    assert env["git_sha"] == sha
    assert env["python"] == ".".join(map(str, sys.version_info[:3]))
    assert env["packages"]["mlflow"]
    assert (env["cpu_count"], env["cpus_usable"]) == (os.cpu_count(), 1)
    assert env["memory_gib"] == 64
    assert {"time", "command", "platform", "host", "cpu", "gpus"} <= set(env)


def test_no_secret_is_written(checkout: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets from the environment, from the command line and from files of the checkout stay out."""
    commit(checkout)
    (checkout / "src" / "a.py").write_text("uri = 'http://me:pw-456@host'\n")
    monkeypatch.setenv("HF_TOKEN", "tok-123")
    typed = {
        "command": "python -m qerl_lab -m task.path=https://me:pw-456@host/a seed=0,1",
        "words": ["task.instruction=two words", "task.path=https://me:pw-456@host/a"],
        "sweep": "adhoc/20260131-120000",
    }
    (run_dir / ".typed").write_text(json.dumps(typed))
    RunDirectory(run_dir).write_environment({})
    env, diff = (run_dir / "env.json").read_text(), (run_dir / "code.diff").read_text()
    assert not [secret for secret in ("tok-123", "pw-456") if secret in env + diff]
    assert "http://***@host" in diff
    began = json.loads(env)
    assert began["command"] == "python -m qerl_lab -m task.path=https://***@host/a seed=0,1"
    assert began["words"] == ["task.instruction=two words", "task.path=https://***@host/a"]
    assert began["sweep"] == "adhoc/20260131-120000"


def test_gpus_are_named_with_their_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = types.SimpleNamespace(uuid="c0-ffee", name="NVIDIA H200", total_memory=141 * 2**30)
    cuda = types.SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties
    )
    fake = types.SimpleNamespace(cuda=cuda, version=types.SimpleNamespace(cuda="12.9"))
    monkeypatch.setitem(sys.modules, "torch", fake)  # type: ignore[arg-type]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 570.1\necho 570.1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    gpu = {"uuid": "c0-ffee", "name": "NVIDIA H200", "memory_gib": 141.0, "driver": "570.1", "cuda": "12.9"}
    assert environment._describe_gpus() == [gpu, gpu]
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert environment._describe_gpus() == [gpu | {"driver": None}] * 2
