"""Run programs written by the model in processes restricted by `code_jail`.

Needs Linux on x86_64 or aarch64 with Landlock (kernel 5.13) and seccomp, but no privileges or namespaces, so it works
in a container. If the kernel cannot confine a program, `check` raises; there is no weaker fallback.
"""

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.tasks import code_jail

JAIL = Path(code_jail.__file__)
OUTPUT_BYTES = 2**20
# The limit is CPU time, so that machine load does not matter. Wall time stops programs that sleep.
CLOCK_SECONDS = 10  # wall-clock limit per second of CPU time
NOT_LIBRARY = ("site-packages", "dist-packages")
# Only the standard library can be imported, and no bytecode is written.
FLAGS = ("-P", "-s", "-S", "-B", "-X", "utf8")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # makes the order of sets reproducible
OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
# Prints the shared libraries that Python's own modules need; their paths differ by system.
MAPPED = """
import importlib, os, sysconfig
for name in os.listdir(sysconfig.get_path("platstdlib") + "/lib-dynload"):
    if not name.startswith(("_test", "_xx", "xx", "_tkinter", "_ctypes_test")):
        try:
            importlib.import_module(name.partition(".")[0])
        except ImportError:
            pass
paths = {line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps")}
print(*sorted(path for path in {*paths, "/etc/ld.so.cache"} if os.path.isfile(path)), sep="\\n")
"""
# Forbidden actions; the script prints the names of those that succeed.
PROBE = """
import os, socket, sys
def reads(path): open(path).read()
attempts = {
    "read a file": lambda: reads("/etc/passwd"),
    "read the parent's environment": lambda: reads(f"/proc/{os.getppid()}/environ"),
    "list a folder": lambda: os.listdir("/"),
    "write a file": lambda: open("file", "w"),
    "open a socket": lambda: socket.socket(),
    "start a process": lambda: os.fork(),
    "run a program": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]),
    "signal its parent": lambda: os.kill(os.getppid(), 0),
}
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    print(name)
"""


@dataclass(frozen=True)
class Program:
    """A Python program as text, standard inputs to run it on, and limits of each run: CPU seconds, MiB of memory."""

    text: str
    inputs: Sequence[str]
    seconds: int
    memory_mib: int


def run(programs: Sequence[Program]) -> list[list[str | None]]:
    """Run each program on each of its inputs. Return a list of outputs per program, None for a run that failed.

    A run fails if the program ends with an error or exceeds a limit. Once a program runs out of time, it is not run on
    its remaining inputs: these outputs are None too. Raises ConfigError if this machine cannot confine programs, and
    RuntimeError if a later run cannot be confined.
    """
    check()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_outputs, programs))


@cache
def check() -> None:
    """Raise ConfigError if this machine cannot confine programs. Cached; the first call runs two short processes."""
    try:
        (could,) = _outputs(Program(PROBE, [""], 10, 512))
    except RuntimeError as error:
        raise ConfigError(
            f"task=code_io runs programs of the model, and this machine cannot confine them: {first_line(error)}. It "
            "needs Linux 5.13 with Landlock and seccomp, which a container may forbid. Type another task."
        ) from error
    if could != "":
        why = "cannot run" if could is None else f"could {', '.join(could.splitlines())}"
        raise ConfigError(
            f"task=code_io runs programs of the model, and on this machine they {why}. Type another task."
        )


def _outputs(program: Program) -> list[str | None]:
    """Run one program on each of its inputs; return its outputs, None for a run that failed.

    Once the program runs out of time, the remaining outputs are None. Raises RuntimeError if it cannot be confined.
    """
    outputs: list[str | None] = []
    with tempfile.TemporaryDirectory(prefix="qerl-code-") as folder:
        file = Path(folder) / "main.py"
        file.write_bytes(program.text.encode(errors="replace"))
        for given in program.inputs:
            output, in_time = _output(program, file, given)
            outputs.append(output)
            if not in_time:
                break
    return outputs + [None] * (len(program.inputs) - len(outputs))


def _output(program: Program, file: Path, given: str) -> tuple[str | None, bool]:
    """Run the program in `file` on the input `given`. Return its output (None: it failed), and whether it was in time.

    Raises RuntimeError if the program cannot be confined.
    """
    report, report_end = os.pipe()
    with open(report, "rb") as reports, open(os.memfd_create("output"), "w+b") as written:
        numbers = (os.getpid(), report_end, program.seconds, program.memory_mib * 2**20, OUTPUT_BYTES)
        try:
            status = subprocess.run(
                [sys.executable, *FLAGS, str(JAIL), str(file), " ".join(map(str, numbers)), *_library()],
                input=given.encode(errors="replace"), stdout=written, stderr=subprocess.DEVNULL, cwd=file.parent,
                env=ENVIRONMENT, pass_fds=(report_end,), timeout=CLOCK_SECONDS * program.seconds,
                start_new_session=True,  # shield the program from Ctrl-C, which only ends the run after the step
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:  # the program slept; subprocess has killed it
            status = -signal.SIGKILL
        finally:
            os.close(report_end)
        if (reported := reports.read().decode()) != code_jail.READY:
            raise RuntimeError(reported or "the process that should run it did not start")
        written.seek(0)
        return (written.read().decode(errors="replace") if status == 0 else None), status not in OUT_OF_TIME


@cache
def _library() -> tuple[str, str]:
    """Return two texts with one path per line: files and folders that a program may read, and folders it may list.

    These are Python's standard library and the shared libraries that it needs.
    """
    folders = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
    entries = list[str]()
    for folder in folders:
        entries += [str(path) for path in Path(folder).iterdir() if path.name not in NOT_LIBRARY and path.exists()]
    mapped = subprocess.run([sys.executable, *FLAGS, "-c", MAPPED], capture_output=True, text=True, check=True)
    return "\n".join([*sorted(entries), mapped.stdout.strip()]), "\n".join(folders)
