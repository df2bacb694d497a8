"""A job as it is handed to what runs it: a thread here, or a process of a cluster on another machine."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from qerl_lab.cli import launch
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.exits import INTERRUPTED, OK, USAGE
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import Typed


class Ended(NamedTuple):
    """How a job ended: its exit code, and why it could not be run, if it could not."""

    code: int
    refusal: str = ""


class Outcome(Protocol):
    """The end of a call to come: a Future, or a job of submitit."""

    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...
    def result(self) -> Ended: ...
    def cancel(self) -> Any: ...


@dataclass(frozen=True)
class Call:
    """Runs a job from its directory, which has its configuration, and says how it ended. It can be pickled.

    It may be called twice: a cluster starts a job again that it stopped. A run that has begun goes on, and one that is
    done stays as it is. `typed` is what the record of a run that goes on says of its command.
    """

    run_dir: Path
    of: launch.OfSweep
    typed: Typed

    def __call__(self, variables: Mapping[str, str] | None = None) -> Ended:
        """Wait for the run's end; `variables` show it its GPUs."""
        run = RunDirectory(self.run_dir)
        if run.status == "done":
            return Ended(OK)
        if self.of.stop_file.exists():
            return Ended(INTERRUPTED)
        of = replace(self.of, variables={**self.of.variables, **(variables or {})})
        try:
            if run.status == "not run":
                return Ended(launch.start(run, run.path, of))
            return Ended(launch.resume(run, self.typed, of))
        except ConfigError as error:
            return Ended(USAGE, f"error: {redact(str(error))}")

    def checkpoint(self) -> Any:
        """What submitit puts back in the queue when a job nears its time limit: the same, once its run has saved."""
        from submitit.helpers import DelayedSubmission

        launch.stop_children()
        return DelayedSubmission(self)
