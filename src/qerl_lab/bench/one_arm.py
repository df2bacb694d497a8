"""Measure one arm: `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`, started by `arm_processes.py`."""

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from qerl_lab.bench.bench_options import Arm, Row
from qerl_lab.bench.job import Job
from qerl_lab.config.message import in_one_line
from qerl_lab.system.processes import end_with_parent
from qerl_lab.system.terminal import quiet_third_parties

LONGEST = 300  # characters of a reason


def main(words: list[str]) -> None:
    """Measure the job of the file JOB.json and append each row to ROWS.jsonl; end when the process PARENT ends."""
    asked, out, parent = words
    end_with_parent(int(parent))
    given = json.loads(Path(asked).read_text(encoding="utf-8"))
    job = Job(**given | {"arm": Arm(**given["arm"])})
    quiet_third_parties()
    with Path(out).open("a", encoding="utf-8", buffering=1) as file:
        try:
            for row in rows_of(job):
                file.write(json.dumps(job.about | row) + "\n")
        except Exception as error:  # if a signal kills the process instead, the parent writes the reason
            reason = f"{type(error).__name__}: {in_one_line(error)[:LONGEST]}"
            file.write(json.dumps({**job.about, "died": reason, "log": traceback.format_exc()}) + "\n")
            raise


def rows_of(job: Job) -> Iterator[Row]:
    """Measure a job with the module for its benchmark and trainer; import vLLM and TRL only if needed."""
    if job.benchmark == "rollout":
        from qerl_lab.bench import rollout

        return rollout.rows(job)
    if job.arm.is_baseline:
        from qerl_lab.bench import stock_trl

        return stock_trl.rows(job)
    from qerl_lab.bench import grpo_step

    return grpo_step.rows(job)


if __name__ == "__main__":
    main(sys.argv[1:])
