"""Directories of jobs: find existing ones, claim new ones, read a sweep, extend a run."""

import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from qerl_lab import preflight
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.cli.intent import words_by_key
from qerl_lab.config.arm import as_recorded, is_of_arm, of_arm
from qerl_lab.config.keys import schema
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import validate
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_word, shell_word
from qerl_lab.preflight import machine, question_counts
from qerl_lab.record.directory import RunDirectory, is_run
from qerl_lab.record.environment import Typed
from qerl_lab.record.folders import first_missing, is_unused, make, numbered, remove_empty, reserve
from qerl_lab.system.disk import lock

LOCK = ".lock"  # in a sweep's directory; held by the command that runs it
COUNTED_OTHERWISE = ("experiment", "scale", "model.name", "lora.start_from", "task.module")  # labels; files by content
SEED = re.compile(r"^seed: (\d+)$", re.MULTILINE)  # in resolved.yaml; found without parsing the YAML


def reuse_directories(plan: Plan) -> Plan:
    """Point each job of a sweep at its existing run directory, if an earlier command made one.

    A run matches a job if arm, seed, gpus, the files of its questions, and every key in which the jobs differ are
    equal. The search covers the sweeps of the same name, or the directory that the command names.
    """
    if not plan.multirun:
        return plan
    sweeps = [plan.directory] if plan.directory_given else sorted(plan.directory.parent.glob("*"), reverse=True)
    varying = _varying(plan.jobs)
    known = [] if plan.jobs[0].config.rerun else _known_runs(sweeps, {job.config.seed for job in plan.jobs}, varying)
    jobs, taken = [], set[Path]()
    for job in plan.jobs:
        own = identity(as_recorded(job.config), varying)
        same = [run for run, its in known if run.path not in taken and its == own]
        same = [run for run in same if _has_same_questions(run, job.config)]
        if same:
            run = next((run for run in same if run.status == "done"), same[0])
            taken.add(run.path)
            job = replace(job, run_dir=run.path, begun=True)
        elif plan.directory_given:  # its name may be taken by an older run
            job = replace(job, run_dir=next(name for name in numbered(job.run_dir) if is_unused(name)))
        jobs.append(job)
    home = [sweep for sweep in sweeps if all(job.begun and job.run_dir.is_relative_to(sweep) for job in jobs)]
    if not home:
        return replace(plan, jobs=jobs)
    return replace(plan, jobs=jobs, directory=home[0], directory_given=True)


def _varying(jobs: list[Job]) -> set[str]:
    """Return the typed keys that differ between jobs and define no arm: `cpu_threads=1,2`."""
    words = [words_by_key(job.overrides) for job in jobs]
    keys = {key for key in set().union(*words) & schema().keys() if not is_of_arm(key)}.difference(COUNTED_OTHERWISE)
    return {key for key in keys if len({own.get(key) for own in words}) > 1}


def identity(settings: Mapping[str, str], varying: Collection[str] = ()) -> dict[str, Any]:
    """Return the settings that must be equal for a job to continue a recorded run."""
    return of_arm(settings) | {key: settings.get(key) for key in ("seed", "gpus", *varying)}


def _known_runs(sweeps: list[Path], seeds: set[int], varying: set[str]) -> list[tuple[RunDirectory, dict[str, Any]]]:
    """Return the readable runs of these sweeps that have one of the seeds, with their identities."""
    found = []
    for run in (run for sweep in sweeps if sweep.is_dir() for run in _runs(sweep)):
        try:
            seed = SEED.search(run.text())
            if seed and int(seed[1]) in seeds:
                found.append((run, identity(run.settings(), varying)))
        except (ConfigError, OSError, UnicodeDecodeError):  # damaged: it could not be resumed
            continue
    return found


def _has_same_questions(run: RunDirectory, config: RunConfig) -> bool:
    """Tell whether the files of the questions are unchanged since the run began."""
    try:
        then = run.environment().get("data") or {}
        now = question_counts.questions(config) if then else {}
    except ConfigError:  # the files are gone: an unfinished run reports that when it resumes
        return True
    return all(then[key] == now[key] for key in ("training_sha256", "heldout_sha256") if key in then and key in now)


def _runs(sweep: Path) -> Iterator[RunDirectory]:
    for path, folders, files in os.walk(sweep):
        if is_run(files):
            folders.clear()
            yield RunDirectory(Path(path))


def sweep_name(directory: Path) -> str:
    """Return the name of a sweep in the records of its runs."""
    return f"{directory.parent.name}/{directory.name}"


def plan_of_sweep(directory: Path) -> Plan | None:
    """Return the jobs of a sweep's directory with their recorded configurations; None if it is no sweep."""
    if not (directory / LOCK).exists():
        return None

    def numbers_first(path: Path) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]

    return read(directory, sorted((run.path for run in _runs(directory)), key=numbers_first))


def read(directory: Path, run_dirs: list[Path]) -> Plan:
    """Return the plan of a sweep with claimed directories. Raises ConfigError."""
    jobs = []
    for number, path in enumerate(run_dirs):
        run = RunDirectory(path)
        jobs.append(Job(number, run.words(), run.config(), path, begun=run.status != "not run"))
    return Plan(jobs, directory, True, True)


def claim(plan: Plan, command: str) -> Plan:
    """Create all directories of new jobs or none; return the plan with their paths. Raises ConfigError."""
    made = first_missing(plan.directory)
    directory = plan.directory if plan.directory_given else reserve(plan.directory)
    made = made or (None if plan.directory_given else directory)
    jobs = [
        job if job.begun else replace(job, run_dir=directory / job.run_dir.relative_to(plan.directory))
        for job in plan.jobs
    ]
    sweep = sweep_name(directory) if plan.multirun else None
    claimed: list[RunDirectory] = []
    is_first = not (directory / LOCK).exists()
    try:
        with locked(directory) if plan.multirun else nullcontext():
            for job in jobs:
                run = RunDirectory(job.run_dir)
                if not run.is_claimed:
                    claimed.append(run)
                    run.claim(replace(job.config, run_dir=str(run.path)), Typed(command, job.overrides, sweep))
    except BaseException:
        for run in reversed(claimed):
            if run.path.is_dir():
                run.discard(run.path)
        if directory.is_dir():
            if is_first:
                (directory / LOCK).unlink(missing_ok=True)
            remove_empty(directory, made)
        raise
    return replace(plan, jobs=jobs, directory=directory, made=made)


def extend(run: RunDirectory, steps: int) -> None:
    """Record that the run continues to `steps`. The run itself adapts its schedules.

    Raises ConfigError unless the run is finished, has fewer steps, and kept the checkpoint of its last step.
    """
    was = run.config()
    if run.status != "done":
        raise ConfigError(
            f"resume={run.path} steps={steps}: the run is {run.status_in_words}, and only a finished one is extended. "
            f"Type {resume_word(run.path)} alone first."
        )
    if steps <= was.steps:
        raise ConfigError(f"steps={steps}: the run has {was.steps} already. Type for example steps={2 * was.steps}.")
    if run.last_saved() != was.steps:
        raise ConfigError(
            f"{run.checkpoints} holds no checkpoint of step {was.steps}, from which the run would go on. "
            f"Type {shell_word('lora.start_from', run.path)} to begin a new run with its adapter."
        )
    cfg = replace(was, steps=steps, extended=[*was.extended, was.steps])
    validate(cfg)
    run.check()
    run.starting_point(was)  # raises for a record that lacks a step, while DONE still exists
    preflight.check(cfg, run.path)
    run.refuse_other_device("cuda" if cfg.device != "cpu" and machine.has_gpu() else "cpu")
    if questions := question_counts.questions(cfg):
        run.refuse_other_data(questions)
    with run.locked():
        run.extend(cfg)


@contextmanager
def locked(sweep: Path) -> Iterator[None]:
    """Lock a sweep's directory, creating it if missing. Raises ConfigError if another command holds it."""
    make(sweep)
    with open(sweep / LOCK, "a", encoding="utf-8") as file:  # opened for writing, because NFS locks no other files
        lock(
            file,
            f"another command runs the sweep in {sweep}. Wait for it or stop it first. For runs of its own type "
            "rerun=true, and another hydra.sweep.dir where you type one.",
        )
        yield
