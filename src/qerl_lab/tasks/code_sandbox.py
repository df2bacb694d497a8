"""Programs of a model, run on inputs by processes that can do nothing else: `code_jail` is what each of them is.

Linux alone, on x86_64 and aarch64, with Landlock (kernel 5.13) and seccomp. It needs no privileges and no namespaces,
so it works in a container too. Where the kernel cannot keep a program in, `check` raises; there is no weaker way.
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
from typing import IO

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.tasks import code_jail

JAIL = Path(code_jail.__file__)
OUTPUT_BYTES = 2**20
# CPU time decides, so that a busy machine decides as an idle one does. A program that sleeps is stopped by the clock.
CLOCK_SECONDS = 10  # for each second of CPU time
NOT_LIBRARY = ("site-packages", "dist-packages")
# Nothing but the standard library can be imported, and nothing is written.
FLAGS = ("-P", "-s", "-S", "-B", "-X", "utf8")
ENVIRONMENT = {"PYTHONHASHSEED": "0"}  # a set prints in one order every time
OUT_OF_TIME = (-signal.SIGKILL, -signal.SIGXCPU)
# Prints the shared libraries that Python's own modules need, which lie elsewhere on every system.
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
# What a program must not be able to do, each line by itself; it prints the names of those that it could do.
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
    """A program, the inputs that it is run on, and its limits for each: seconds of CPU time, MiB of address space."""

    text: str
    inputs: Sequence[str]
    seconds: int
    memory_mib: int


def run(programs: Sequence[Program]) -> list[list[str | None]]:
    """What each program writes on each of its inputs; None where it fails or passes a limit.

    After the first input on which a program runs out of time it is not run again: its other outputs are None too.

    Raises:
        RuntimeError: the kernel refuses now what it did in `check`, e.g. a process.
    """
    check()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_outputs, programs))


@cache
def check() -> None:
    """Raise ConfigError where this machine cannot keep a program in. Once a process; costs two short processes."""
    if sys.platform != "linux":
        raise ConfigError(
            "task=code_io runs programs of the model, which needs Linux to keep them in. Type another task."
        )
    try:
        (could,) = _outputs(Program(PROBE, [""], 10, 512))
    except RuntimeError as error:
        raise ConfigError(
            f"task=code_io runs programs of the model, and this machine cannot keep them in: {first_line(error)}. It "
            "needs Linux 5.13 with Landlock and seccomp, which a container may forbid. Type another task."
        ) from error
    if could != "":
        said = "cannot run them" if could is None else f"they could {', '.join(could.split(chr(10))[:-1])}"
        raise ConfigError(f"task=code_io runs programs of the model, and on this machine {said}. Type another task.")


def _outputs(program: Program) -> list[str | None]:
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
    """What the program writes on one input, or None where it fails; and whether it ended in time."""
    told, tell = os.pipe()
    with open(told, "rb") as reasons, open(os.memfd_create("output"), "w+b") as written:
        try:
            status = _status(program, file, given, written, tell)
        finally:
            os.close(tell)
        if (said := reasons.read().decode()) != code_jail.READY:
            raise RuntimeError(said or "the process that should run it did not start")
        written.seek(0)
        return (written.read().decode(errors="replace") if status == 0 else None), status not in OUT_OF_TIME


def _status(program: Program, file: Path, given: str, written: IO[bytes], tell: int) -> int:
    """The exit status of the program on an input; negative where a signal ended it."""
    numbers = (os.getpid(), tell, program.seconds, program.memory_mib * 2**20, OUTPUT_BYTES)
    try:
        return subprocess.run(
            [sys.executable, *FLAGS, str(JAIL), str(file), " ".join(map(str, numbers)), *_library()],
            input=given.encode(errors="replace"), stdout=written, stderr=subprocess.DEVNULL, cwd=file.parent,
            env=ENVIRONMENT, pass_fds=(tell,), timeout=CLOCK_SECONDS * program.seconds,
            start_new_session=True,  # Ctrl-C lets a step end, and must not cost a program its score
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:  # the program slept, and is killed by now
        return -signal.SIGKILL


@cache
def _library() -> tuple[str, str]:
    """What a program may read, and which folders it may list: Python's library, without packages that were added."""
    folders = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
    entries = [
        str(entry)
        for folder in folders
        for entry in Path(folder).iterdir()
        if entry.name not in NOT_LIBRARY and entry.exists()
    ]
    mapped = subprocess.run([sys.executable, *FLAGS, "-c", MAPPED], capture_output=True, text=True, check=True)
    return "\n".join([*sorted(entries), mapped.stdout.strip()]), "\n".join(folders)
