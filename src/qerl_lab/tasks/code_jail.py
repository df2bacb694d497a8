"""Child process of `code_sandbox`: it restricts itself, then runs a program written by the model.

`code_sandbox` starts it as a script, once for every input. It only imports modules that load fast: no json, typing or
runpy.

The kernel refuses, whatever the program does, even through ctypes or machine code:

    reading     Landlock: files and folders other than Python's library and the program itself
    writing     Landlock and seccomp: every file; standard output is a size-limited file in memory
    network     seccomp: no system call creates a socket
    processes   seccomp: none creates a process or thread, executes a program, or sends a signal
    the rest    seccomp: every system call that is not in CALLS
    time, memory, output, open files    rlimits, which an unprivileged process cannot raise

Not refused: asking whether a file exists and how large it is.
"""

import builtins
import ctypes
import os
import resource
import sys
from _sitebuiltins import Quitter
from struct import pack

Instruction = tuple[int, int, int, int]  # of BPF: code, jump if true, jump if false, constant
READY = "confined"
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of CALLS, AUDIT_ARCH_*
# Allowed system calls with their numbers on x86_64 and aarch64; -1: does not exist.
CALLS = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "lseek": (8, 62), "readv": (19, 65), "writev": (20, 66),
    "pread64": (17, 67), "pwrite64": (18, 68), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24),
    "stat": (4, -1), "lstat": (6, -1), "fstat": (5, 80), "newfstatat": (262, 79), "statx": (332, 291),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "getdents64": (217, 61), "getcwd": (79, 17),
    "readlink": (89, -1), "readlinkat": (267, 78),
    "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216),
    "futex": (202, 98), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128), "setitimer": (38, 103),
    "getitimer": (36, 102), "alarm": (37, -1), "poll": (7, -1), "ppoll": (271, 73), "select": (23, -1),
    "pselect6": (270, 72), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153),
    "getrusage": (98, 165), "getrlimit": (97, 163), "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getpid": (39, 172), "gettid": (186, 178),
    "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176), "getegid": (108, 177),
    "set_robust_list": (273, 99), "rseq": (334, 293), "exit": (60, 93), "exit_group": (231, 94),
}  # fmt: skip
# Calls allowed with some arguments only. `allow_calls` checks one argument's value or its forbidden bits.
OPEN, OPENAT, IOCTL, FCNTL, PRLIMIT, MADVISE = (2, -1), (257, 56), (16, 29), (72, 25), (302, 261), (28, 233)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
TERMINAL, FCNTLS = (0x5401,), (0, 1, 2, 3, 4, 1030)  # TCGETS; F_DUPFD to F_SETFL, F_DUPFD_CLOEXEC: none signals
# NORMAL to DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE. Not MERGEABLE, which leaks other processes' memory by its timing, and
# not HWPOISON, with which root can disable memory of the machine.
ADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050001, 0x80000000  # REFUSE gives EPERM
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # codes of BPF instructions
ARGUMENTS = 16  # byte offset of a call's arguments, of 8 bytes each, in the data that seccomp gives a filter
READ_FILE, READ_DIR = 1 << 2, 1 << 3  # Landlock's rights to a file and to a folder
# Landlock's file rights: all of its first version, and (bit, version that added it) of REFER, TRUNCATE, IOCTL_DEV.
FIRST_RIGHTS, LATER_RIGHTS = (1 << 13) - 1, ((13, 2), (14, 3), (15, 5))
NETWORK_SINCE, SCOPE_SINCE = 4, 6  # versions of Landlock that added rules for TCP, and for signals and sockets
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # Landlock calls, the same on every architecture
PDEATHSIG, SECCOMP, NO_NEW_PRIVS = 1, 22, 38  # prctl options
SIGKILL = 9

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, *arguments: int | bytes) -> int:
    """Make the system call number `arguments[0]` with the other arguments; return its result.

    Raises OSError if the call fails; `what` begins the error message.
    """
    result = _libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def _prctl(option: int, *arguments: object) -> None:
    """Call `prctl(option, *arguments)` for this process. Raises OSError if it fails."""
    if _libc.prctl(option, *arguments, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def limit(seconds: int, memory_bytes: int, output_bytes: int) -> None:
    """Limit CPU time and address space of this process, and the size of each file that it writes.

    Also limits open files to 64, and core dumps and locked memory to 0. A hard limit that is already lower stays.
    """
    for what, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_MEMLOCK, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def allow_reading(files: list[str], listed: list[str]) -> None:
    """Forbid this process to read or change files, irrevocably, except to read `files` and to list folders `listed`.

    Both are lists of paths. A folder in `files` allows reading everything below it, a folder in `listed` allows listing
    the folders below it. Raises OSError if a path does not exist or the kernel lacks Landlock.
    """
    abi = _call("Landlock", CREATE_RULESET, 0, 0, 1)
    handled = FIRST_RIGHTS | sum(1 << bit for bit, since in LATER_RIGHTS if abi >= since)
    attribute = pack("QQQ", handled, 3 * (abi >= NETWORK_SINCE), 3 * (abi >= SCOPE_SINCE))
    ruleset = _call("Landlock", CREATE_RULESET, attribute, len(attribute), 0)
    rights = [(path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE) for path in files]
    for path, allowed in [*rights, *((path, READ_DIR) for path in listed)]:
        beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
        _call(f"Landlock {path}", ADD_RULE, ruleset, 1, pack("=Qi", allowed, beneath), 0)
        os.close(beneath)
    _call("Landlock", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def allow_calls(machine: str) -> None:
    """Forbid this process all system calls, irrevocably, except those in CALLS.

    The calls OPEN, OPENAT, IOCTL, FCNTL, PRLIMIT and MADVISE are allowed too, but with some arguments only. `machine`
    is a key of ARCHITECTURES. Raises OSError if the kernel refuses the filter.
    """
    column, audit = ARCHITECTURES[machine]
    instructions = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    if machine == "x86_64":  # refuse the numbers of its x32 variant
        instructions += [(AT_LEAST, 0, 1, 0x40000000), (RETURN, 0, 0, KILL)]
    for numbers in CALLS.values():
        if numbers[column] >= 0:
            instructions += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, ALLOW)]
    instructions += _allow_without_bits(OPEN[column], 1, WRITES) + _allow_without_bits(OPENAT[column], 2, WRITES)
    instructions += _allow_one_of(IOCTL[column], 1, TERMINAL) + _allow_one_of(FCNTL[column], 1, FCNTLS)
    instructions += _allow_one_of(MADVISE[column], 2, ADVICE)
    # A program may query a limit, but not set one.
    instructions += _allow_without_bits(PRLIMIT[column], 2, 0xFFFFFFFF, both_halves=True)
    code = b"".join(pack("HBBI", *one) for one in [*instructions, (RETURN, 0, 0, REFUSE)])
    program = pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer := ctypes.create_string_buffer(code)))
    _prctl(SECCOMP, 2, ctypes.create_string_buffer(program))
    del buffer


def _allow_without_bits(number: int, index: int, bits: int, both_halves: bool = False) -> list[Instruction]:
    """Return BPF instructions that allow system call `number` if argument `index` (from 0) has none of `bits` set.

    They refuse the call otherwise. They test the lower 32 bits of the argument, and with `both_halves` the upper 32
    bits against the same `bits` too.
    """
    tests = []
    for at in (ARGUMENTS + 8 * index, ARGUMENTS + 8 * index + 4)[: 1 + both_halves]:
        tests += [(LOAD, 0, 0, at), (ANY_BIT, 0, 1, bits), (RETURN, 0, 0, REFUSE)]
    return _only_for_call(number, [*tests, (RETURN, 0, 0, ALLOW)])


def _allow_one_of(number: int, index: int, values: tuple[int, ...]) -> list[Instruction]:
    """Return BPF instructions that allow system call `number` if argument `index` (from 0) is one of `values`.

    They refuse the call otherwise.
    """
    tests = [test for value in values for test in ((EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
    return _only_for_call(number, [(LOAD, 0, 0, ARGUMENTS + 8 * index), *tests, (RETURN, 0, 0, REFUSE)])


def _only_for_call(number: int, instructions: list[Instruction]) -> list[Instruction]:
    """Limit BPF `instructions`, which must end in RETURN, to system call `number`: other calls skip them.

    Returns an empty list if `number` is -1, because the machine lacks this call.
    """
    return [(EQUAL, 0, len(instructions), number), *instructions] if number >= 0 else []


def main(program: str, numbers: str, readable: str, listed: str) -> None:
    """Restrict this process, report READY or the error to its parent, and if READY run the file `program` as a script.

    The kernel kills this process when its parent ends. `numbers` are separated by spaces: the parent's process id, the
    file descriptor to report to, and the arguments of `limit`. `readable` and `listed` are paths, one per line.
    """
    parent, report_end, *limits = map(int, numbers.split())
    try:
        machine = os.uname().machine
        if machine not in ARCHITECTURES:
            raise OSError(f"a machine {machine}; allowed: {', '.join(ARCHITECTURES)}")
        _prctl(PDEATHSIG, SIGKILL)
        if os.getppid() != parent:
            raise OSError("the parent is gone")
        _prctl(NO_NEW_PRIVS, 1)
        limit(*limits)
        allow_reading([program, *readable.split("\n")], listed.split("\n"))
        allow_calls(machine)
        report = READY
    except OSError as error:
        report = str(error)
    os.write(report_end, report.encode())
    os.close(report_end)
    if report != READY:
        return
    module = type(sys)("__main__")
    module.__file__ = program
    builtins.exit, builtins.quit = Quitter("exit", ""), Quitter("quit", "")  # site, which defines them, is not loaded
    sys.modules["__main__"], sys.argv = module, [program]
    with open(program, encoding="utf-8") as file:
        exec(compile(file.read(), program, "exec"), vars(module))  # the only exec in this package


if __name__ == "__main__":
    main(*sys.argv[1:])
