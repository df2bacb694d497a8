"""Entry point of the process that trains one run.

    python -m qerl_lab.train RUN_DIR PARENT

RUN_DIR must contain `resolved.yaml`. `python -m qerl_lab` writes that file, locks it, and starts this process, passing
its process id as PARENT. On success this process writes DONE (the summary as JSON). On an error it writes FAILED (the
reason, then the traceback) and exits with code 2 for a configuration that cannot run, 1 for any other error. After
SIGINT, SIGTERM, SIGHUP or the death of PARENT it writes neither and exits with code 130.
"""

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system import exits, terminal
from qerl_lab.system.exits import FAILURE, FULL, USAGE
from qerl_lab.train.stop import Diverged, Stop


def main(directory: RunDirectory, parent: int) -> int:
    """Train the run in `directory`; return the exit code: 0 done, 130 interrupted, 2 for a ConfigError, else 1.

    Writes FAILED on an error. `parent` is the id of the process that started this one: the run stops when it dies.
    """
    stop = Stop.on_signals(parent)
    is_alone = True
    try:
        cfg = directory.config()
        is_alone = cfg.gpus == 1
        if os.environ.get("RANK", "0") != "0":  # rank 0 prints for all
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        # These imports take over ten seconds. Signal handlers are installed already.
        if cfg.device != "cpu":
            from qerl_lab.train.ranks import hide_other_gpus

            if notice := hide_other_gpus(cfg.gpus):
                print(notice, flush=True)
        with terminal.quiet_imports():
            check_vllm_imports()
            from qerl_lab.train import run

        return run.run(cfg, directory, stop)
    except Exception as caught:  # the process boundary: FAILED records every error
        error = caught if directory.is_claimed else gone_error(directory.path)
        trace = redact(traceback.format_exc())
        if is_alone or directory.status != "failed":  # else another rank failed first and wrote FAILED
            directory.fail(f"{type(error).__name__}: {redact(str(error))}\n\n{trace}")
        if needs_traceback(error):
            print(trace, end="", file=sys.stderr)
        return USAGE if isinstance(error, ConfigError) else FAILURE


def gone_error(path: Path) -> ConfigError:
    """Return the error that tells how to continue a run after its directory `path` was removed or renamed."""
    return ConfigError(
        f"{path} was removed or renamed while its run was writing there. If it was renamed, type resume=DIR with the "
        "name that it has now: the run continues from its last checkpoint."
    )


def check_vllm_imports() -> None:
    """Raise ConfigError if vLLM is installed but cannot be imported.

    TRL imports vLLM whenever it is installed, even with `rollout=transformers`, and has no switch for that.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        return
    try:
        importlib.import_module("trl.generation.vllm_generation")
    except Exception as error:  # a broken package can raise anything: a missing library, an incompatible torch
        place = next(iter(found.submodule_search_locations or [str(found.origin)]))
        raise ConfigError(
            f"vLLM is installed ({place}) and cannot be imported ({type(error).__name__}: {first_line(error)}). "
            "TRL imports it in every run, also with rollout=transformers. "
            "Type pip uninstall vllm, or install a vLLM that fits this torch."
        ) from error


def needs_traceback(error: Exception) -> bool:
    """Tell whether `main` prints the error's traceback, because the message alone does not say enough."""
    if isinstance(error, OSError):
        return error.errno not in FULL
    is_engine_failure = type(error).__name__ == "EngineFailed"  # by name, because importing the class imports torch
    return not (is_engine_failure or isinstance(error, ConfigError | Diverged))


if __name__ == "__main__":
    exits.survive_lost_console()
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal() or not RunDirectory(Path(sys.argv[1])).is_claimed:
        print(
            "error: python -m qerl_lab.train takes RUN_DIR and PARENT, the id of the process that has locked it. "
            "Type python -m qerl_lab with the words of a run, or resume=RUN_DIR.",
            file=sys.stderr,
        )
        sys.exit(USAGE)
    exits.leave(main(RunDirectory(Path(sys.argv[1])), int(sys.argv[2])))
