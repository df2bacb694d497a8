"""The files of a run directory: metrics.jsonl, mlflow.json, env.json and code.diff.

Imports nothing of ours, and torch only to ask for the GPU. What is written holds no environment variables and no
passwords of URLs.
"""

import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "qerl-lab", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "safetensors", "tokenizers",
    "compressed-tensors", "bitsandbytes", "vllm", "triton", "mlflow", "hydra-core", "omegaconf", "numpy",
)  # fmt: skip


class MetricsLine(TypedDict):
    step: int
    time: float
    metrics: dict[str, float]


def encode(step: int, metrics: Mapping[str, float]) -> bytes:
    """One line of strict JSON, which knows no NaN or Infinity: a value that is not finite becomes null."""
    values = {name: float(value) for name, value in metrics.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": int(step), "time": time.time(), "metrics": finite}, allow_nan=False).encode() + b"\n"


def read_metrics(run_dir: Path) -> list[MetricsLine]:
    """The lines of RUN_DIR/metrics.jsonl in the order written; a step may have several (held-out evaluation).

    `time` is unix seconds. A value that was not finite is nan. A last line without its end (the process was killed
    inside the write) is left out. Raises FileNotFoundError, and ValueError naming any other line that is no record.
    """
    return lines_from(Path(run_dir) / "metrics.jsonl", 0)[0]


def lines_from(path: Path, offset: int) -> tuple[list[MetricsLine], int]:
    """The complete lines that start at byte `offset`, and the offset after them."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    lines = [_decode(line, f"{path}, line {n} after byte {offset},") for n, line in enumerate(whole.splitlines(), 1)]
    return lines, offset + len(whole)


def _decode(line: bytes, where: str) -> MetricsLine:
    try:
        record = json.loads(line)
        values = {name: math.nan if value is None else float(value) for name, value in record["metrics"].items()}
        return {"step": int(record["step"]), "time": float(record["time"]), "metrics": values}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where} is not a metrics record: {line[:80]!r}") from error


def cut_metrics(run_dir: Path, last_step: int) -> None:
    """Drop every line of RUN_DIR/metrics.jsonl after `last_step`, and a torn one, atomically. No file is no error."""
    path = Path(run_dir) / "metrics.jsonl"
    if path.exists():
        lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        replace_file(path, b"".join(line for line in lines if _decode(line, str(path))["step"] <= last_step))


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, then rename: whoever is killed here leaves the old file or the new one."""
    aside = path.with_name(path.name + ".tmp")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


class MirrorRecord:
    """RUN_DIR/mlflow.json: which MLflow run mirrors this directory. Exists before MLflow is first asked.

    `key` is the run's own name for itself and becomes a tag, so that a process killed between creating the MLflow run
    and noting its `run_id` finds that run again. `uri` is null where it would store a password. `status` is null until
    the run has ended.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path, self._lock = Path(run_dir) / "mlflow.json", threading.Lock()
        self.values: dict[str, Any] = {"key": uuid.uuid4().hex, "run_id": None, "uri": None, "status": None}
        if self._path.exists():
            self.values |= json.loads(self._path.read_text())

    def set(self, **changes: str | None) -> None:
        with self._lock:  # the mirror's thread notes the run id while the trainer may note the end
            self.values |= changes
            replace_file(self._path, json.dumps(self.values, indent=1).encode())


def without_password(text: str) -> str:
    """`text` with the user and password of every URL in it left out."""
    return re.sub(r"//[^/\s@]+@", "//", text)


def write_environment(run_dir: Path) -> None:
    """Write env.json and code.diff. A resumed run keeps its first pair and gets env.2.json, code.2.diff."""
    n = 1
    while (env := run_dir / _numbered("env", n, "json")).exists():
        n += 1
    (run_dir / _numbered("code", n, "diff")).write_text(code_diff(), encoding="utf-8")
    replace_file(env, json.dumps(environment(), indent=1).encode() + b"\n")


def _numbered(stem: str, n: int, suffix: str) -> str:
    return f"{stem}.{suffix}" if n == 1 else f"{stem}.{n}.{suffix}"


def environment() -> dict[str, Any]:
    """Where this process runs, as plain values; what cannot be found out is null."""
    sha, dirty = git_state()
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": without_password(shlex.join(sys.argv)),
        "git_sha": sha,
        "dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "gpus": _gpus(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return found[1] if found else platform.processor() or None


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _gpus() -> list[dict[str, Any]]:
    """Name, memory and driver of every GPU that torch sees."""
    try:
        import torch
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    about = {"driver": driver.split()[0] if driver else None, "cuda": torch.version.cuda}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_gib": round(gpu.total_memory / 2**30, 1), **about} for gpu in devices]


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
        return f"# no checkout: the installed package qerl-lab {_version('qerl-lab') or 'of unknown version'}\n"
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
    """What a command prints; None if it is missing, fails or takes over 30 s."""
    # A git hook's GIT_DIR would point elsewhere; without optional locks a status never disturbs the user's own git.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
