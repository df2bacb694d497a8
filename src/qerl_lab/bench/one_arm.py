"""Measure one arm: `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`, started by `arm_processes.py`."""

import json
import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.job import Job
from qerl_lab.config.message import in_one_line
from qerl_lab.system.processes import end_with_parent
from qerl_lab.system.terminal import quiet_third_parties

LONGEST = 300  # characters of a reason


def main(words: list[str]) -> None:
    """Measure a job in this process, and append each row to a file. The process ends when its parent ends.

    `words` are the path JOB.json, the path ROWS.jsonl, and the parent's process id. If an error is raised, a row with
    the reason as `died` is appended, then the error is raised again.
    """
    job_file, rows_file, parent = words
    end_with_parent(int(parent))
    job = Job(**json.loads(Path(job_file).read_text(encoding="utf-8")))
    quiet_third_parties()
    with Path(rows_file).open("a", encoding="utf-8", buffering=1) as file:
        try:
            for row in rows_of(job):
                file.write(json.dumps(job.about | row) + "\n")
        except Exception as error:  # if a signal kills the process instead, the parent writes the reason
            reason = f"{type(error).__name__}: {in_one_line(error)[:LONGEST]}"
            file.write(json.dumps({**job.about, "died": reason, "log": traceback.format_exc()}) + "\n")
            raise


def rows_of(job: Job) -> Iterator[Row]:
    """Measure a job with the function `rows` of the module `qerl_lab.bench.NAME`; NAME is `job.benchmark`.

    Imports only that module, so that vLLM and TRL load only where they are needed.
    """
    rows: Iterator[Row] = import_module(f"qerl_lab.bench.{job.benchmark}").rows(job)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
