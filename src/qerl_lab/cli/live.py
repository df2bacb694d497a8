"""Show the progress of a sweep, read from the records of its runs: on a terminal a table, elsewhere plain lines."""

import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from qerl_lab.cli.compose import Job
from qerl_lab.cli.manual import split_overrides
from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system.terminal import LINES, columns, estimate_time_left

REDRAW_SECONDS = 1.0
HEAD = ["job", "step", "reward", "ETA", "words"]


class JobProgress:
    """Progress of one job of a sweep, read from the record of its run.

    `overrides` are those in which the job differs from the others. Damaged lines are ignored: the run reports them.
    """

    def __init__(self, job: Job, overrides: str) -> None:
        self.number, self.steps, self.overrides = job.number, job.config.steps, overrides
        self.run, self.is_running = RunDirectory(job.run_dir), False
        # A job that an earlier command began is running once it has one more session. A new job is running as soon as
        # it leaves the queue, even before its first session: so -1.
        self._earlier_sessions = -1 if self.run.status == "not run" else self._count_sessions()
        self.step, self.first_step, self.reward, self.eta = 0, 0, "-", "-"
        self.printed_tenth: int | None = None
        self.read_progress()
        self.first_step = self.step  # reached before this command; the ETA counts from there

    def refresh(self) -> None:
        """Update whether the job is running, and its progress."""
        self.is_running = self.run.status == "interrupted" and self._count_sessions() > self._earlier_sessions
        if self.is_running:
            self.read_progress()

    def read_progress(self) -> None:
        """Update step, reward and ETA from the run's record; keep the old values if the record is damaged."""
        with suppress(ConfigError):
            lines = [line for line in self.run.metrics() if line["step"] > 0 and "reward/mean" in line["metrics"]]
            if lines:
                self.step, self.reward = lines[-1]["step"], f"{lines[-1]['metrics']['reward/mean']:.2f}"
            times = [line["time"] for line in lines if line["step"] > self.first_step]
            left = self.steps - self.step
            self.eta = estimate_time_left(times[-1] - times[0], len(times) - 1, left) if times else "-"

    def _count_sessions(self) -> int:
        """Return how many processes have worked on the run so far; 0 if its record is damaged."""
        with suppress(ConfigError):
            return len(self.run.sessions())
        return 0


class SweepProgress:
    """Show on standard error how far a sweep is: a table on a terminal, lines elsewhere.

    `jobs` are all its jobs, `left` those that are not done yet. Once `stop_file` exists the sweep is stopping, and no
    ETA is shown.
    """

    def __init__(self, jobs: list[Job], left: Sequence[Job], stop_file: Path) -> None:
        overrides = {job.number: " ".join(own) for job, own in zip(jobs, split_overrides(jobs)[1], strict=True)}
        self._left = {job.number: JobProgress(job, overrides[job.number]) for job in left}
        self._all, self._started = list(self._left.values()), time.monotonic()
        self._ended, self._count = Counter({"done": len(jobs) - len(left)}), len(jobs)
        self._stop_file, self._is_stopped = stop_file, False
        self._drawn, self._looked = 0, -REDRAW_SECONDS

    def update(self) -> None:
        """Redraw the table, at most once a second.

        Without a terminal print a line when a job starts, and at each tenth of a job.
        """
        if time.monotonic() < self._looked + REDRAW_SECONDS:
            return
        self._looked = time.monotonic()
        for job in self._left.values():
            job.refresh()
        running = [job for job in self._left.values() if job.is_running]
        if sys.stderr.isatty():
            rows = [[str(job.number), f"{job.step}/{job.steps}", job.reward, job.eta, job.overrides] for job in running]
            self._draw_table([*(columns([HEAD, *rows]).splitlines() if rows else []), self._summary()])
            return
        for job in running:
            tenth = job.step * LINES // job.steps
            if tenth != job.printed_tenth:
                job.printed_tenth = tenth
                progress = f"step {job.step}/{job.steps}, ETA {job.eta}, reward {job.reward}"
                print(
                    f"job {job.number}: {progress if tenth else f'running, {job.overrides}'}",
                    file=sys.stderr,
                    flush=True,
                )

    def end_job(self, job: Job, message: str) -> None:
        """Remove an ended job from the table and print its status.

        `message` says why the job failed and is printed below; empty if there is nothing to say.
        """
        progress = self._left.pop(job.number)
        progress.read_progress()
        status = progress.run.status
        self._ended[status] += 1
        self.close()
        if status == "not run" and not message:  # the sweep stopped before this job began
            return
        reward = f", reward {progress.reward}" if progress.reward != "-" else ""
        line = f"job {job.number}: {status}{reward}, {progress.overrides} ({self._summary()})"
        print("\n".join(filter(None, (line, message))), file=sys.stderr, flush=True)

    def is_running(self, job: Job) -> bool:
        """Tell whether the job was running at the last update. It must not have ended."""
        return self._left[job.number].is_running

    def close(self) -> None:
        """Erase the table from the terminal, if there is one."""
        self._draw_table([])

    def _summary(self) -> str:
        """Format the sweep's state as `12 of 40 done, 1 failed, 2 running, ETA 2:10:00`."""
        parts = [f"{self._ended['done']} of {self._count} done"]
        parts += [f"{count} {word}" for word, count in self._ended.items() if word != "done"]
        if running := sum(job.is_running for job in self._left.values()):
            parts.append(f"{running} running")
        left = sum(job.steps - job.step for job in self._left.values())
        made = sum(job.step - job.first_step for job in self._all)
        if left and made and not self._stop_file.exists():
            parts.append(f"ETA {estimate_time_left(time.monotonic() - self._started, made, left)}")
        return ", ".join(parts)

    def _draw_table(self, table: list[str]) -> None:
        """Replace the lines drawn last on the terminal by `table`. Drops the first lines if not all fit.

        After a stop it draws below the message about the stop. Draws nothing without a terminal.
        """
        if not sys.stderr.isatty():
            return
        if not self._is_stopped and self._stop_file.exists():
            self._is_stopped, self._drawn = True, 0
        size = os.get_terminal_size(sys.stderr.fileno())  # 0 x 0 if the terminal reports no size
        table = table[-max(1, (size.lines or 24) - 1) :]
        up = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
        sys.stderr.write(up + "".join(line[: (size.columns or 100) - 1] + "\n" for line in table))
        sys.stderr.flush()
        self._drawn = len(table)
