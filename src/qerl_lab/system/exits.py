"""Exit codes, signals, and a lost console: how every command ends.

After `| head`, a closed terminal or `>&-`, output is discarded and the work continues. Every command starts through
`run`.
"""

import atexit
import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, NoReturn, TextIO

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact

OK = 0  # done
FAILURE = 1  # a run, or the work of another command, failed
USAGE = 2  # a configuration error
INTERRUPTED = 130  # ended by a signal; the same command, or resume=, continues
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = (errno.EPIPE, errno.EIO)  # the pipe has no reader; the terminal is closed
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full; the user's quota is used up
Main = Callable[[list[str]], int]  # command-line arguments -> exit code
_left: list[int] = []  # the exit code that was passed to `leave`


def run(main: Main) -> None:
    """Call a command's `main` with the arguments of this process, then exit with the exit code that `main` returns."""
    survive_lost_console()
    sys.excepthook = _print_redacted
    code = command(main)(sys.argv[1:])
    if code == INTERRUPTED:  # Python may end by the signal itself if it came inside exec()
        os._exit(code)
    leave(code)


def _print_redacted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected error and its traceback to standard error, with secrets replaced. Set as `sys.excepthook`."""
    sys.stderr.write(redact("".join(traceback.format_exception(kind, error, trace))))


def leave(code: int) -> NoReturn:
    """Exit with this code like `sys.exit`, but skip the teardown of imported modules (with torch it takes seconds)."""
    _left.append(code)
    sys.exit(code)


@atexit.register  # registered before slow imports, because atexit runs the first function last
def _exit_without_teardown() -> None:
    """Flush the output and end the process at once if `leave` was called. Runs at exit."""
    if _left:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_left[-1])


def command(main: Main) -> Main:
    """Wrap a command's `main`: turn expected errors into one printed message and an exit code.

    ConfigError gives 2, another ValueError or an OSError gives 1. Ctrl-C gives 130 and prints `interrupted`, with the
    text of the KeyboardInterrupt if it has one.
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
        except ConfigError as error:
            print(f"error: {redact(str(error))}", file=sys.stderr)
            return USAGE
        except (ValueError, OSError) as error:
            print(f"error: {redact(in_one_line(error) or type(error).__name__)}", file=sys.stderr)
            return FAILURE

    return main_with_exit_code


def survive_lost_console() -> None:
    """Replace stdout and stderr by streams that discard output once their terminal or the pipe's reader is gone."""
    for descriptor in (0, 1, 2):  # one closed by `>&-` would be reused for the next opened file, e.g. a record
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = _lasting_stream(sys.stdout, 1), _lasting_stream(sys.stderr, 2)


def _lasting_stream(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    """Return a stream to `descriptor` that outlives its reader (`_LastingFile`), encoded like `stream`; None: UTF-8."""
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
    """Return the signals that stop a run: SIGINT, SIGTERM, and SIGHUP unless it is ignored (nohup)."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
