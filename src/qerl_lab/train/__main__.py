"""The process of one run: be ready for signals, then import what a run needs, then run it.

    python -m qerl_lab.train RUN_DIR [PARENT]

RUN_DIR holds `resolved.yaml`; `python -m qerl_lab` writes it, starts this and gives its own process id as PARENT.
Without PARENT it locks the directory itself.
Leaves DONE (the summary, JSON) or FAILED (the reason, then the traceback; exit status 2 for a configuration that cannot
run, 1 for the rest); after SIGINT, SIGTERM, SIGHUP or the end of PARENT neither, and exit status 130.
"""

import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from qerl_lab import exits, terminal
from qerl_lab.cli.one_process import refuse_several
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.exits import FAILURE, FULL, USAGE
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train.installed import check_vllm
from qerl_lab.train.stop import Diverged, Stop


def main(directory: RunDirectory, parent: int) -> int:
    """Run what the directory holds; on an exception leave FAILED and return 1 or 2."""
    stop, is_alone = Stop.on_signals(parent), True
    try:
        cfg = directory.config()
        refuse_several(os.environ, cfg.gpus)
        is_alone, speaks = cfg.gpus == 1, os.environ.get("RANK", "0") == "0"  # rank 0 speaks for all
        if speaks:
            directory.reserve_room()
        else:
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        # These imports take ten seconds and more, in which signals are heard already.
        if cfg.device != "cpu":
            from qerl_lab.train import gpus

            if said := gpus.keep(cfg.gpus):
                print(said, flush=True)
        with terminal.quiet_imports():
            check_vllm()
            from qerl_lab.train import run

        code = run.run(cfg, directory, stop)
        if speaks:
            directory.release_room()
        return code
    except Exception as error:  # the boundary of the process: every reason ends up in FAILED
        trace = redact(traceback.format_exc())
        if is_alone or directory.status != "failed":  # by another rank, whose end this one has met
            directory.fail(f"{type(error).__name__}: {redact(str(error))}\n\n{trace}")
        if not is_told_in_a_line(error):
            print(trace, end="", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILURE


def is_told_in_a_line(error: Exception) -> bool:
    """Whether a traceback would tell a user no more: it is no bug."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return isinstance(error, ConfigError | Diverged) or type(error).__name__ == "EngineFailed"  # its module has torch


def read(words: list[str]) -> tuple[RunDirectory, int]:
    """RUN_DIR and PARENT, by default whoever started this. Raises ConfigError for other words."""
    path, parent = (*words, str(os.getppid()))[:2] if words else ("", "")
    if len(words) not in (1, 2) or not parent.isdecimal() or not RunDirectory(Path(path)).is_claimed:
        raise ConfigError(
            "python -m qerl_lab.train takes RUN_DIR, a directory with resolved.yaml, and maybe PARENT, the id of a "
            f"process; {' '.join(words) or 'nothing'} was given. "
            "Type python -m qerl_lab resume=RUN_DIR, which starts it."
        )
    return RunDirectory(Path(path)), int(parent)


if __name__ == "__main__":
    exits.outlast()
    held = ExitStack()
    try:
        given = read(sys.argv[1:])
        if len(sys.argv) == 2:  # typed by hand: a command holds the lock for the process that it starts
            held.enter_context(given[0].locked())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(USAGE)
    exits.leave(main(*given))
