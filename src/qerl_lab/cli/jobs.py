"""Directories of jobs: find the directories of an earlier sweep, create new ones, read a sweep, extend a run."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from qerl_lab import preflight
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.config.arm import as_recorded, settings_of_arm
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import resume_override, shell_override
from qerl_lab.preflight import machine, question_counts
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand, code_hash
from qerl_lab.system.disk import lock, make_directory
from qerl_lab.system.terminal import by_numbers, format_path

LOCK = ".lock"  # in a sweep's directory; held by the command that runs it


def continue_sweep(plan: Plan) -> Plan:
    """Find an earlier sweep of the same jobs. Return the plan with that sweep's directories, so that its runs continue.

    Looks in hydra.sweep.dir if the user typed it, else among the sweeps beside `plan.directory`, from the newest on.
    Jobs are the same if directory name, arm, seed, gpus and question files agree. A sweep beside `plan.directory` must
    also have all the jobs and the current code hash, because other code may give other numbers. If none matches, the
    plan keeps its directories. Its jobs then get a note on the last sweep that ran all of them with other code, or that
    ran only some of them and no other job. A single run is returned unchanged.

    Raises ConfigError if, in a typed hydra.sweep.dir, the directory of a job holds a run that differs from the job.
    """
    if not plan.multirun:
        return plan
    if plan.directory_is_fixed:
        jobs = []
        for job in plan.jobs:
            run = RunDirectory(job.run_dir)
            if run.is_claimed and not _has_same_run(job):
                raise ConfigError(
                    f"{run.path} has a run with another configuration or other questions. Type another hydra.sweep.dir."
                )
            jobs.append(replace(job, begun=run.is_claimed))
        return replace(plan, jobs=jobs)
    notes, code = list[str](), code_hash()
    locks = [(path.stat().st_mtime_ns, path) for path in plan.directory.parent.glob(f"*/{LOCK}")]
    for directory in (path.parent for _, path in sorted(locks, reverse=True)):  # a lock dates from the sweep's begin
        jobs = [replace(job, begun=True) for job in _move_jobs(plan, directory)]
        claimed = [job for job in jobs if RunDirectory(job.run_dir).is_claimed]
        if not claimed or not all(map(_has_same_run, claimed)):
            continue
        sessions = [session for job in claimed for session in RunDirectory(job.run_dir).environments()]
        is_same_code = all(session.get("code_hash") == code for session in sessions)
        if is_same_code and len(claimed) == len(jobs):
            return replace(plan, jobs=jobs, directory=directory, directory_is_fixed=True)
        if notes:  # on a sweep begun later
            continue
        runs_there = len(list(directory.rglob("resolved.yaml")))
        if len(claimed) in (len(jobs), runs_there):
            typed = shell_override("hydra.sweep.dir", format_path(directory))
            why, to_do = "", "run only the others"
            if not is_same_code:
                why = ", made by other source files of qerl_lab (code_hash in env.json), and here all begin anew"
                to_do = "go on with those"
            notes = [f"{len(claimed)} of these runs are in {format_path(directory)}{why}: type {typed} to {to_do}"]
    return replace(plan, jobs=[replace(job, notes=[*job.notes, *notes]) for job in plan.jobs])


def _move_jobs(plan: Plan, directory: Path) -> list[Job]:
    """Return the plan's jobs with run directories below `directory` instead of `plan.directory`. Touches no files."""
    return [replace(job, run_dir=directory / job.run_dir.relative_to(plan.directory)) for job in plan.jobs]


def _has_same_run(job: Job) -> bool:
    """Tell whether the run in the job's directory is of the same arm, seed, gpus and questions.

    Questions are the same if the hashes of their files agree, even if the files were moved. Without hashes to compare,
    because none were recorded or the files are gone, they are the same if task.path is. Returns False for a run with a
    damaged record, which could not be resumed.
    """
    run, wanted = RunDirectory(job.run_dir), as_recorded(job.config)
    try:
        recorded, data = run.settings(), next(iter(run.environments()), {}).get("data") or {}
    except ConfigError:
        return False
    arm_of_run, arm_of_job = settings_of_arm(recorded), settings_of_arm(wanted)
    is_same_path = arm_of_run.get("task.path") == arm_of_job["task.path"]
    is_same_arm = arm_of_run | {"task.path": arm_of_job["task.path"]} == arm_of_job
    if not is_same_arm or any(recorded.get(key) != wanted[key] for key in ("seed", "gpus")):
        return False
    try:
        data_now = question_counts.recorded_questions(job.config) if data else {}
    except ConfigError:
        return is_same_path
    keys = [key for key in ("training_sha256", "heldout_sha256") if key in data and key in data_now]
    return all(data[key] == data_now[key] for key in keys) and (is_same_path or bool(keys))


def sweep_name(directory: Path) -> str:
    """Return the name by which runs record their sweep: the last two parts of `directory`, the sweep's directory."""
    return f"{directory.parent.name}/{directory.name}"


def plan_of_sweep(directory: Path) -> Plan | None:
    """Read the plan of the sweep in a directory; None if there is none. Raises ConfigError if it holds no run."""
    if not (directory / LOCK).exists():
        return None
    jobs, run_dirs = list[Job](), [path.parent for path in directory.rglob("resolved.yaml")]
    if not run_dirs:
        raise ConfigError(f"{directory} is of a sweep and holds no run. Type the line that began the sweep.")
    for number, path in enumerate(sorted(run_dirs, key=lambda path: by_numbers(str(path)))):
        run = RunDirectory(path)
        jobs.append(Job(number, run.overrides(), run.config(), path, begun=True))
    return Plan(jobs, directory, directory_is_fixed=True, multirun=True)


def claim_directories(plan: Plan, command: str) -> Plan:
    """Create the run directories that do not exist yet; return the plan with the final paths.

    If `plan.directory` already exists, the next free name (NAME-2) is used, unless `plan.directory_is_fixed`. `command`
    is the command line as the user typed it; each new directory records it. Raises ConfigError if a directory is in use
    or cannot be created.
    """
    directory = plan.directory if plan.directory_is_fixed else reserve_directory(plan.directory)
    jobs = _move_jobs(plan, directory)
    sweep = sweep_name(directory) if plan.multirun else None
    with locked_sweep(directory) if plan.multirun else nullcontext():
        for job in jobs:
            run = RunDirectory(job.run_dir)
            if not run.is_claimed:
                run.claim(replace(job.config, run_dir=str(run.path)), TypedCommand(command, job.overrides, sweep))
    return replace(plan, jobs=jobs, directory=directory)


def reserve_directory(wanted: Path) -> Path:
    """Create `wanted`; if it exists, create the first free of NAME-2, NAME-3 ... instead. Return the new path."""
    make_directory(wanted.parent, str(wanted.parent))
    numbers, candidate = itertools.count(2), wanted
    while True:
        try:
            candidate.mkdir()
            return candidate
        except FileExistsError:
            candidate = wanted.with_name(f"{wanted.name}-{next(numbers)}")


def extend_run(run: RunDirectory, steps: int) -> None:
    """Record that a finished run shall continue up to step `steps`. Does not start the run.

    When the run resumes, its schedules stretch over the new number of steps. Raises ConfigError unless the run is
    finished, has fewer than `steps` steps, kept its last checkpoint intact, and can resume on this machine with the
    same questions.
    """
    was = run.config()
    if run.status != "done":
        raise ConfigError(
            f"resume={run.path} steps={steps}: the run is {run.status_in_words}; allowed: a finished run. "
            f"Type {resume_override(run.path)} alone first."
        )
    if steps <= was.steps:
        raise ConfigError(
            f"steps={steps}: the run already has {was.steps} steps; allowed: more. "
            f"Type for example steps={2 * was.steps}."
        )
    try:
        saved = checkpoint.load(checkpoint.path_of(run.checkpoints, was.steps))
    except (OSError, ValueError) as damage:  # a run that is not finished would go on from an earlier checkpoint
        started_from = ("model.path", run.model) if was.trains_all else ("lora.start_from", run.path)
        raise ConfigError(
            f"{run.checkpoints} lacks an intact checkpoint of step {was.steps} ({damage}), which the run needs to "
            f"continue. Type {shell_override(*started_from)} to begin a new run with its weights."
        ) from None
    cfg = replace(was, steps=steps, extended=[*was.extended, was.steps])
    run.check()
    run.refuse_unfit_record(saved)  # while DONE still exists
    preflight.check(cfg, run.path)
    run.refuse_other_device("cuda" if cfg.device != "cpu" and machine.has_gpu() else "cpu")
    if questions := question_counts.recorded_questions(cfg):
        run.refuse_other_data(questions)
    with run.locked():
        run.extend(cfg)


@contextmanager
def locked_sweep(directory: Path) -> Iterator[None]:
    """Context manager: lock a sweep's directory, and create it if missing.

    Raises ConfigError if another command holds the lock.
    """
    make_directory(directory, f"hydra.sweep.dir={directory}")
    with open(directory / LOCK, "a", encoding="utf-8") as file:  # opened for writing, because NFS locks no other files
        lock(
            file,
            f"another command runs the sweep in {directory}. Wait for that command, or stop it. For a separate sweep "
            "type another hydra.sweep.dir.",
        )
        yield
