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
Main = Callable[[list[str]], int]  # words of a command line -> exit code
_left: list[int] = []  # exit code passed to `leave`


@contextmanager
def starting(module: str) -> Iterator[None]:
    """End with one line if Ctrl-C comes while a command imports. `module` is its `__name__`."""
    try:
        yield
    except KeyboardInterrupt:
        if module != "__main__":
            raise
        say_now("interrupted")
        os._exit(INTERRUPTED)


def run(main: Main) -> None:
    """Run a command as the process, and exit with its code."""
    survive_lost_console()
    sys.excepthook = lambda *about: sys.stderr.write(redact("".join(traceback.format_exception(*about)))) and None
    code = command(main)(sys.argv[1:])
    if code == INTERRUPTED:  # Python may end by the signal itself if it came inside exec()
        os._exit(code)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit like `sys.exit`, without tearing down imported modules: for torch and TRL that takes seconds.

    Waits for threads, runs atexit functions, and flushes standard output and error.
    """
    _left.append(code)
    sys.exit(code)


@atexit.register  # registered before slow imports, because atexit runs the first function last
def _end_now() -> None:
    if _left:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_left[-1])


def command(main: Main) -> Main:
    """Wrap `main` to turn expected errors into an exit code and one message; other errors keep their traceback.

    ConfigError is 2. ValueError and OSError, which the work of a command raises, are 1. Ctrl-C is 130; the argument of
    its KeyboardInterrupt, if any, says how to continue.
    """

    @wraps(main)
    def ended(words: list[str]) -> int:
        try:
            code = main(words)
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

    return ended


def survive_lost_console() -> None:
    """Send stdout and stderr to /dev/null once their terminal or reader is gone."""
    for descriptor in (0, 1, 2):  # a closed descriptor would be reused for the next opened file, e.g. a record
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1), _lasting(sys.stderr, 2)


def _lasting(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    """Return a stream like this one, which is None if it was closed, on a `_LastingFile`."""
    if stream is not None:
        stream.flush()
    encoding, errors = getattr(stream, "encoding", "utf-8"), getattr(stream, "errors", None)
    raw = io.BufferedWriter(_LastingFile(descriptor, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors, line_buffering=True)


class _LastingFile(io.FileIO):
    def write(self, data: Any, /) -> int:
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
    """Write a line to standard error, unbuffered, as signal handlers must."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def stop_signals() -> tuple[signal.Signals, ...]:
    """List the signals that stop a run: all of `SIGNALS`, but no SIGHUP if it is ignored, as under nohup."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
