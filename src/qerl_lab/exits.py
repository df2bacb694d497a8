"""End of every command: its exit code, the signals that end it, and a console that may go away while it works.

After `| head`, a closed terminal or `>&-` what is printed goes nowhere, and the work goes on. Every command starts
through `run`. Imports little, so that Ctrl-C while a command imports the rest is one line already.
"""

import atexit
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NoReturn

OK = 0  # done
FAILURE = 1  # a run, or what the command does, failed
USAGE = 2  # a configuration error
INTERRUPTED = 130  # a signal ended it; the same command, or resume=, goes on
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LOST = (errno.EPIPE, errno.EIO)  # nobody reads the pipe; the terminal is closed
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk; the share of it that is this user's
STOPS: list[int] = []  # signals that a sweep of this process took: a sweep that ends done all the same tells by them
Main = Callable[[list[str]], int]  # words of a command line -> exit code
_left: list[int] = []  # the code that `leave` was given


@contextmanager
def starting(module: str) -> Iterator[None]:
    """End the process of a command in one line when Ctrl-C comes while it imports. `module` is its `__name__`."""
    try:
        yield
    except KeyboardInterrupt:
        if module != "__main__":
            raise
        say_now("interrupted")
        os._exit(INTERRUPTED)


def run(main: Main, keeps_record: bool = False) -> None:
    """Be the process of a command: outlast the console, and leave with the command's exit code.

    One that `keeps_record` of its work outlasts a full disk under its console too.
    """
    outlast(keeps_record)
    code = command(main)(sys.argv[1:])
    if code == INTERRUPTED:  # Python itself may end by the signal once more, if it came inside of an exec()
        os._exit(code)
    leave(code)


def leave(code: int) -> NoReturn:
    """Exit as `sys.exit` does, without taking apart what was imported: of torch and TRL that takes seconds.

    Threads are waited for, what others registered with atexit is called, and standard output and error are flushed.
    """
    _left.append(code)
    sys.exit(code)


@atexit.register  # before anything that takes seconds is imported: the first to be registered is called last
def _end_now() -> None:
    if _left:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_left[-1])


def command(main: Main) -> Main:
    """Give `main` an exit code and one message for what ends it early; anything else is a bug, with its traceback.

    ConfigError is 2. ValueError and OSError, which the work of a command raises, are 1. Ctrl-C is 130; the argument of
    its KeyboardInterrupt, if there is one, says how to go on.
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
            return _told(error)

    return ended


def _told(error: ValueError | OSError) -> int:
    from qerl_lab.config.message import in_one_line
    from qerl_lab.config.option import ConfigError
    from qerl_lab.config.redact import redact

    is_usage = isinstance(error, ConfigError)
    text = str(error) if is_usage else in_one_line(error) or type(error).__name__
    print(f"error: {redact(text)}", file=sys.stderr)
    return USAGE if is_usage else FAILURE


def outlast(full_disk: bool = False) -> None:
    """Send standard output and error to os.devnull once their reader is gone, or their disk is full."""
    for descriptor in (0, 1, 2):  # a closed one would be given to the next file that is opened, a record for example
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    lost = (*LOST, *FULL) if full_disk else LOST
    sys.stdout, sys.stderr = _lasting(sys.stdout, 1, lost), _lasting(sys.stderr, 2, lost)


def say_now(text: str) -> None:
    """Write a line on standard error past every buffer, as a signal handler may need it."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def _lasting(stream: object, descriptor: int, lost: tuple[int, ...]) -> io.TextIOWrapper:
    raw = _Lasting(descriptor, "w", closefd=False)
    raw.lost = lost
    if not isinstance(stream, io.TextIOWrapper):  # None where it was closed
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", line_buffering=True)
    stream.flush()
    is_prompt = stream.line_buffering or stream.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=is_prompt)


class _Lasting(io.FileIO):
    lost: tuple[int, ...] = ()  # errors after which what is written goes nowhere

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self.lost:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return len(data)


def heard() -> tuple[signal.Signals, ...]:
    """List the signals that stop a run; under nohup, which has SIGHUP ignored, a closed terminal does not."""
    return tuple(n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN)
