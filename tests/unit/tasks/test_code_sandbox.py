"""Programs that try to escape, to exceed limits or to harm other processes, and programs that just work."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.tasks import code_jail, code_sandbox
from qerl_lab.tasks.code_sandbox import Program
from waiting import has_ended, wait_for

SECRET = "a-secret-of-the-parent"
# Each attempt is the `try` block of a program, which prints "out" if the attempt succeeds.
TRIES = {
    # reading
    "read a file": "open('/etc/passwd').read()",
    "read a file of the user": "open('{secret}').read()",
    "read it by a raw call": "assert ctypes.CDLL(None).syscall(2, b'{secret}', 0, 0) >= 0",
    "read it by its directory": "os.open('{secret}', os.O_RDONLY, dir_fd=os.open('/', os.O_RDONLY | os.O_DIRECTORY))",
    "read it through a handle without rights": "open('/proc/self/fd/%d' % os.open('{secret}', os.O_PATH)).read()",
    "map it": "mmap.mmap(os.open('{secret}', os.O_RDONLY), 0, prot=mmap.PROT_READ)",
    "link to it and read": "os.symlink('{secret}', 'here'); open('here').read()",
    "list a folder": "os.listdir('/')",
    "list its own folder": "os.listdir('.')",
    "read the parent's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "trace the parent": "assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "find the parent's secret": "assert {secret!r} in str(os.environ) or 'SECRET' in os.environ",
    "use a handle of the parent": "[os.fstat(d) for d in range(3, 64) if d != 99].pop()",
    # import tricks
    "import the package from its folder": "sys.path.append('{source}'); import qerl_lab",
    "import an installed package from its folder": "sys.path += {site}; import numpy",
    "read what it is judged by from the frames": "frame = sys._getframe()\nwhile frame:\n    "
    "assert 'outputs' not in frame.f_locals\n    frame = frame.f_back\nraise OSError",
    # writing
    "write a file": "open('file', 'w')",
    "write in the folder of all": "open('{in_tmp}', 'w')",
    "write over a file": "os.open('{secret}', os.O_WRONLY)",
    "remove its text": "os.remove(__file__)",
    "truncate a file": "os.truncate('{secret}', 0)",
    "change a file's rights": "os.chmod('{secret}', 0o777)",
    "make a file in memory": "os.memfd_create('x')",
    # network
    "connect": "socket.create_connection(('127.0.0.1', {port}), timeout=1)",
    "make a socket": "socket.socket()",
    "make a socket by a raw call": "assert ctypes.CDLL(None).syscall(41, 2, 1, 0) >= 0",
    "make an io_uring": "assert ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)) >= 0",
    # processes
    "fork": "os.fork()",
    "fork by a raw call": "assert ctypes.CDLL(None).syscall(57) >= 0",
    "start a process": "subprocess.run(['true'])",
    "be another program": "os.execv('/bin/sh', ['sh', '-c', 'echo out'])",
    "kill the parent": "os.kill(os.getppid(), 9)",
    "kill the parent by a raw call": "assert ctypes.CDLL(None).syscall(62, os.getppid(), 9) == 0",
    "have a file signal the parent": "fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
    "choose the signal of a file": "fcntl.fcntl(0, 10, 9)",
    "limit the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))",
    "type into the terminal": "fcntl.ioctl(0, 0x5412, b'x')",
    # memory
    "find pages that others have too": "m = mmap.mmap(-1, 4096); m.madvise(mmap.MADV_MERGEABLE)",
    # limits
    "raise its memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "outlive its parent": "assert ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0",
    "loosen the filter": "assert ctypes.CDLL(None).prctl(22, 0, 0, 0, 0) == 0",
}  # fmt: skip
BLOCK = """
import ctypes, fcntl, mmap, os, resource, signal, socket, subprocess, sys, threading
try:
    {attempt}
except (OSError, AssertionError, ImportError, RuntimeError, IndexError, ValueError):
    print("in")
else:
    print("out")
"""


def one(text: str, given: str = "", seconds: int = 5, memory_mib: int = 256) -> str | None:
    return code_sandbox.run([Program(text, [given], seconds, memory_mib)])[0][0]


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Yield a file, a listening port, a secret variable and a free name in /tmp; then assert that none was reached."""
    in_tmp = Path("/tmp", f"out-{secrets.token_hex(8)}")
    file = tmp_path_factory.mktemp("outside") / "secret"
    file.write_text(SECRET)
    before = file.stat()
    os.environ["SECRET"] = SECRET
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = Path(code_sandbox.__file__).parents[2]
        yield {
            "secret": str(file), "port": server.getsockname()[1], "source": str(source), "site": repr(sys.path),
            "in_tmp": str(in_tmp),
        }  # fmt: skip
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    del os.environ["SECRET"]
    after = file.stat()
    assert (file.read_text(), after.st_mode, after.st_mtime_ns, after.st_nlink, after.st_uid) == (
        SECRET, before.st_mode, before.st_mtime_ns, 1, before.st_uid,
    )  # fmt: skip
    assert not in_tmp.exists()


def filled(attempt: str, outside: dict[str, object]) -> str:
    for name, value in outside.items():
        attempt = attempt.replace("{" + name + "!r}", repr(value)).replace("{" + name + "}", str(value))
    return BLOCK.format(attempt=attempt.replace("\n", "\n    "))


def test_no_attempt_to_escape_succeeds(outside: dict[str, object]) -> None:
    programs = [Program(filled(attempt, outside), [""], 5, 256) for attempt in TRIES.values()]
    outputs = dict(zip(TRIES, (found[0] for found in code_sandbox.run(programs)), strict=True))
    killed = {"make a socket by a raw call", "fork by a raw call"} if os.uname().machine != "x86_64" else set()
    assert {name: output for name, output in outputs.items() if output != "in\n" and name not in killed} == {}


@pytest.mark.parametrize("name", ["read a file of the user", "write a file", "kill the parent"])
def test_attempts_to_escape_succeed_outside_of_the_sandbox(
    name: str, outside: dict[str, object], tmp_path: Path
) -> None:
    """Otherwise the test above could not fail. The parent of the program is a process that may be killed."""
    file = tmp_path / "try.py"
    file.write_text(filled(TRIES[name], outside))
    starter = "import subprocess, sys; subprocess.run([sys.executable, sys.argv[1]])"
    out = subprocess.run([sys.executable, "-c", starter, str(file)], capture_output=True, text=True, cwd=tmp_path)
    assert "out" in out.stdout or out.returncode == -signal.SIGKILL


# --- limits


def test_an_endless_program_ends_in_time_and_is_not_run_again() -> None:
    started = time.monotonic()
    (outputs,) = code_sandbox.run([Program("while True: pass", ["1"] * 20, 1, 256)])
    assert outputs == [None] * 20
    assert time.monotonic() - started < 15


def test_a_sleeping_program_is_stopped_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_sandbox, "CLOCK_SECONDS", 1)
    started = time.monotonic()
    assert one("import time; time.sleep(1000)", seconds=1) is None
    assert time.monotonic() - started < 20


TOO_MUCH = ["a = [0] * 10**9", "a = []\n    while True: a.append('x' * 10**6)", "import mmap; mmap.mmap(-1, 10**9)"]
FLOODS = ["import os\nwhile True: os.write(1, b'x' * 10**5)", "import os\nos.lseek(1, 2**40, 0)\nos.write(1, b'x')"]
FAILING = [
    "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "9 ** 9 ** 9 ** 9",
    "def", "raise SystemExit(3)", "import os; os.abort()", "print(1); 1/0", "\0", "\ud800", "(" * 10**5,
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", "import os; os.close(1); print(1)",
]  # fmt: skip


def test_memory_is_limited() -> None:
    texts = [f"try:\n    {text}\nexcept (MemoryError, OSError):\n    print('caught')" for text in TOO_MUCH]
    assert code_sandbox.run([Program(text, [""], 5, 256) for text in texts]) == [["caught\n"]] * len(texts)


def test_programs_that_exceed_limits_or_fail_count_as_failed_and_crash_nothing() -> None:
    programs = [Program(text, [""], 2, 2048) for text in FLOODS] + [Program(text, [""], 1, 256) for text in FAILING]
    outputs = zip(FLOODS + FAILING, code_sandbox.run(programs), strict=True)
    assert {text[:60]: found for text, found in outputs if found != [None]} == {}


# --- programs that just work


def test_exit_and_quit_end_a_program_as_in_plain_python() -> None:
    outputs = {
        "print(1)\nexit()\n1/0": "1\n", "def f(): quit(0)\nprint(2)\nf()\n1/0": "2\n", "print(3)\nexit(3)": None,
        "print(4)\nexit('why')": None,
    }  # fmt: skip
    found = code_sandbox.run([Program(text, [""], 5, 256) for text in outputs])
    assert found == [[output] for output in outputs.values()]


def test_a_program_has_its_input_and_the_standard_library() -> None:
    text = (
        "import sys, bisect, collections, decimal, fractions, functools, hashlib, heapq, itertools, json, math\n"
        "import random, re, bz2, lzma, sqlite3, statistics, unicodedata, zlib, dataclasses, enum, typing, time\n"
        "@dataclasses.dataclass\nclass A:\n    x: 'int'\n"
        "n = int(input())\nrows = sys.stdin.readlines()\nprint(n, len(rows), A(1), __name__, sys.argv[1:], flush=True)"
    )
    assert one(text, "3\na\nü\n") == "3 2 A(x=1) __main__ []\n"


def test_neither_unread_input_nor_a_flood_of_errors_is_a_failure() -> None:
    assert one("import sys\nfor _ in range(1000): sys.stderr.write('x' * 10**5)\nprint(1)", "x" * 10**7) == "1\n"


def test_each_input_gets_its_own_process() -> None:
    text = "import builtins\nprint(hasattr(builtins, 'seen'), input())\nbuiltins.seen = True"
    assert code_sandbox.run([Program(text, ["1", "2"], 5, 256)]) == [["False 1\n", "False 2\n"]]


def test_a_set_of_texts_is_printed_in_the_same_order_every_time() -> None:
    text = "print({'a', 'b', 'c', 'd', 'e', 'f', 'g'})"
    (outputs,) = code_sandbox.run([Program(text, [""] * 4, 5, 256)])
    assert len(set(outputs)) == 1
    assert outputs[0]


def test_outputs_keep_the_order_of_the_programs() -> None:
    programs = [
        Program(f"import time; time.sleep({0.3 if n == 0 else 0}); print({n})", ["", ""], 5, 256) for n in range(9)
    ]
    assert code_sandbox.run(programs) == [[f"{n}\n"] * 2 for n in range(9)]


def test_no_file_process_thread_or_handle_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code_sandbox.check()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = (threading.active_count(), set(os.listdir("/proc/self/fd")))
    of_other_tests = set(psutil.Process().children())
    code_sandbox.run([Program(text, ["", ""], 1, 256) for text in ("print(1)", "while True: pass", "1/0")])
    assert list(tmp_path.iterdir()) == []
    assert (threading.active_count(), set(os.listdir("/proc/self/fd"))) == before
    assert set(psutil.Process().children()) <= of_other_tests


@pytest.mark.slow
def test_a_program_ends_with_its_parent(tmp_path: Path) -> None:
    """A run that SIGKILL ends leaves no program behind."""
    script = (
        "from qerl_lab.tasks import code_sandbox as s\ns.check()\nprint('ready', flush=True)\n"
        "s.run([s.Program('import time; time.sleep(300)', [''], 100, 256)])"
    )
    # Temporary files that survive SIGKILL are in the folder of this test.
    here = os.environ | {"TMPDIR": str(tmp_path)}
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=here)
    assert child.stdout
    assert child.stdout.readline() == "ready\n"
    programs = wait_for(psutil.Process(child.pid).children, 60)
    assert os.getsid(programs[0].pid) != os.getsid(child.pid), "Ctrl-C would reach it"
    child.kill()
    child.wait()
    wait_for(lambda: all(map(has_ended, programs)), 60)


# --- a machine that cannot confine a program


@pytest.fixture
def unchecked() -> Iterator[None]:
    code_sandbox.check.cache_clear()
    yield
    code_sandbox.check.cache_clear()


@pytest.mark.parametrize(("line", "said"), [
    ("_call(\"Landlock\", RESTRICT_SELF, ruleset, 0)", "on this machine they could read a file, "),
    ("_prctl(SECCOMP, 2, ctypes.create_string_buffer(program))", "they could open a socket, start a process"),
    ("CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446", "] Landlock: Function not implemented. It needs Linux"),
])  # fmt: skip
def test_a_weaker_sandbox_is_an_error(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unchecked: None
) -> None:
    """The jail lacks one of its protections, or the kernel lacks Landlock."""
    text = Path(code_jail.__file__).read_text()
    assert text.count(line) == 1
    weaker = tmp_path / "jail.py"
    weaker.write_text(text.replace(line, line.replace("444, 445, 446", "9444, 445, 446") if "444" in line else "pass"))
    monkeypatch.setattr(code_sandbox, "JAIL", weaker)
    with pytest.raises(ConfigError) as caught:
        code_sandbox.run([Program("print(1)", [""], 5, 256)])
    assert said in str(caught.value)
    assert "Type another task." in str(caught.value)
