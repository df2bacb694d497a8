"""Exit codes, signals, and a lost console: how every command ends.

After `| head`, a closed terminal or `>&-`, output is discarded and the work continues. Every command starts through
`run`. Imports little, so that Ctrl-C during the remaining imports already prints a single line.
"""

import atexit
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NoReturn, TextIO

from qerl_lab.config.redact import redact

OK = 0  # done
FAILURE = 1  # a run, or the work of another command, failed
USAGE = 2  # a configuration error
INTERRUPTED = 130  # ended by a signal; the same command, or resume=, continues
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = (errno.EPIPE, errno.EIO)  # the pipe has no reader; the terminal is closed
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full; the user's quota is
STOPS: list[int] = []  # signals received by a sweep of this process; shows a stop even if the sweep ended as done
Main = Callable[[list[str]], int]  # command-line arguments -> exit code
_left: list[int] = []  # exit code passed to `leave`


@contextmanager
def starting(module: str) -> Iterator[None]:
    """Around the imports of a command `module` (its `__name__`): on Ctrl-C print one line and exit."""
    try:
        yield
    except KeyboardInterrupt:
        if module != "__main__":
            raise
        say_now("interrupted")
        os._exit(INTERRUPTED)


def run(main: Main) -> None:
    """Run a command's `main` on this process's arguments, and exit with its exit code."""
    survive_lost_console()
    sys.excepthook = lambda *about: sys.stderr.write(redact("".join(traceback.format_exception(*about)))) and None
    code = command(main)(sys.argv[1:])
    if code == INTERRUPTED:  # Python may end by the signal itself if it came inside exec()
        os._exit(code)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit with this code like `sys.exit`, without tearing down imported modules, for which torch takes seconds."""
    _left.append(code)
    sys.exit(code)


@atexit.register  # registered before slow imports, because atexit runs the first function last
def _exit_without_teardown() -> None:
    if _left:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_left[-1])


def command(main: Main) -> Main:
    """Wrap a command's `main`: turn expected errors into one printed message and an exit code.

    ConfigError gives 2; ValueError and OSError give 1. Ctrl-C gives 130, and prints the KeyboardInterrupt's argument.
    """

    @wraps(main)
    def main_with_exit_code(arguments: list[str]) -> int:
        try:
            code = main(arguments)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt as interrupt:
            say_now("; ".join(["interrupted", *map(str, interrupt.args)]))
            return INTERRUPTED
        except (ValueError, OSError) as error:
            from qerl_lab.config.message import in_one_line
            from qerl_lab.config.option import ConfigError

            is_usage = isinstance(error, ConfigError)
            text = str(error) if is_usage else in_one_line(error) or type(error).__name__
            print(f"error: {redact(text)}", file=sys.stderr)
            return USAGE if is_usage else FAILURE

    return main_with_exit_code


def survive_lost_console() -> None:
    """Replace stdout and stderr by streams that discard what is written once their terminal or reader is gone."""
    for descriptor in (0, 1, 2):  # a closed descriptor would be reused for the next opened file, e.g. a record
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _lasting_stream(sys.stdout, 1), _lasting_stream(sys.stderr, 2)


def _lasting_stream(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    if stream is not None:
        stream.flush()
    encoding, errors = getattr(stream, "encoding", "utf-8"), getattr(stream, "errors", None)
    raw = io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=True)


class _LastingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        """Override the write: once the terminal or reader is gone, send this and all later output to /dev/null."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def say_now(text: str) -> None:
    """Write a line to standard error at once, unbuffered, for signal handlers."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def stop_signals() -> tuple[signal.Signals, ...]:
    """List the signals that stop a run: all of `SIGNALS`, but SIGHUP only if it is not ignored (nohup)."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
