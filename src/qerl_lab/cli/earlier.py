"""What earlier commands have of a sweep: finished jobs are skipped, stopped ones go on where they lie.

A run is a job's if configuration (as `config/arm.py` tells arms apart), seed, number of processes and kind of device
agree, and questions where they lie in files here. It is looked for in the sweeps of the same name, or in the directory
that the command names. No run is two jobs'.
"""

import copy
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from qerl_lab import preflight
from qerl_lab.cli.compose import Job, Plan
from qerl_lab.config.arm import as_recorded, of_arm
from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.disk import alone_in, lock, read_json, replace_file
from qerl_lab.record.directory import RunDirectory, first_missing, is_run, is_unused, make, numbered, remove_empty

INDEX, MASTER = "sweep.json", "multirun.yaml"  # its jobs; what Hydra composed for it as a whole
LOCK = ".lock"  # of the command that runs it: a file of its own, because a file that is replaced loses its lock
_ANEW = "Type the line that began the sweep: it takes the runs that are there, and makes the others."
OF_A_RUN = re.compile(r"^seed: (\d+)$", re.MULTILINE)  # in resolved.yaml, found without reading the whole as YAML


def reuse(plan: Plan) -> Plan:
    """The plan whose jobs lie where an earlier command put them, as far as one did; all of them new under rerun=true.

    Raises ConfigError where another process runs one of them now.
    """
    if not plan.multirun or plan.jobs[0].config.rerun:
        return plan
    parent = plan.directory.parent
    sweeps = [plan.directory] if plan.directory_given else sorted(parent.glob("*"), reverse=True)
    known = [(sweep, run) for sweep in sweeps if sweep.is_dir() for run in _runs(sweep)]
    jobs = _found(plan, known)
    home = _home(jobs, sweeps) if all(job.begun for job in jobs) else None
    if home is None:
        return replace(plan, jobs=jobs)
    return replace(plan, jobs=jobs, directory=home, directory_given=True)


def apart(plan: Plan) -> Plan:
    """Give each new job an unused directory where an older run already has its name."""
    if not (plan.multirun and plan.directory_given):
        return plan
    return replace(plan, jobs=[job if job.begun else replace(job, run_dir=_unused(job.run_dir)) for job in plan.jobs])


def _unused(path: Path) -> Path:
    return next(name for name in numbered(path) if is_unused(name))


def _home(jobs: list[Job], sweeps: list[Path]) -> Path | None:
    """The newest sweep that knows all of these jobs, or that has them and was killed before it noted any.

    None where they are of several: to note them in one of those would make it forget its others.
    """
    paths = {str(job.run_dir.absolute()) for job in jobs}
    for sweep in sweeps:
        if (sweep / INDEX).exists():
            if paths <= {os.path.abspath(path) for path in _known(sweep)}:
                return sweep
        elif all(job.run_dir.is_relative_to(sweep) for job in jobs):
            return sweep
    return None


def _runs(sweep: Path) -> Iterator[RunDirectory]:
    for path, folders, files in os.walk(sweep):
        if is_run(files):
            folders.clear()
            yield RunDirectory(Path(path))


def refuse_above_runs(directory: Path) -> None:
    """Raise ConfigError for a directory that is no run's and no sweep's, and holds runs."""
    inside = min((run.path for run in _runs(directory)), default=directory)
    if inside != directory:
        raise ConfigError(
            f"resume={directory} holds runs, {inside.relative_to(directory)} for one, and no {INDEX}. Type one of "
            "them, or one sweep. A sweep that was killed before it noted its jobs goes on with the line that began it."
        )


def _found(plan: Plan, known: list[tuple[Path, RunDirectory]]) -> list[Job]:
    """The jobs in the directories of their runs, no two in one: first those whose every word a run has, then others."""
    same = [[pair for pair in known if _is_of(pair[1], job.config, plan.is_here)] for job in plan.jobs]
    telling = _telling([job.config for job in plan.jobs], [{run.path for _, run in pairs} for pairs in same])
    found, taken = list(plan.jobs), set[Path]()
    for exactly in (True, False):
        for index, job in enumerate(found):
            left = [] if job.begun else [pair for pair in same[index] if pair[1].path not in taken]
            if exactly and telling[index]:
                left = [pair for pair in left if telling[index].items() <= pair[1].settings().items()]
            if left:
                found[index] = _in_the_best(job, left)
                taken.add(found[index].run_dir)
    return found


def _telling(configs: list[RunConfig], runs: list[set[Path]]) -> list[dict[str, str]]:
    """What tells each job from those that the same runs could be: keys that make no arm, as recorded."""
    values = [as_recorded(config) for config in configs]
    rivals = [[values[index] for index, other in enumerate(runs) if other & own] for own in runs]
    return [
        {name: value for name, value in own.items() if any(other[name] != value for other in others)}
        for own, others in zip(values, rivals, strict=True)
    ]


def _in_the_best(job: Job, same: list[tuple[Path, RunDirectory]]) -> Job:
    """The job in the directory of its finished run, else of the newest that began it. Raises ConfigError."""
    sweep, run = next((pair for pair in same if pair[1].status == "done"), same[0])
    if run.status != "done":
        _refuse_running(sweep, run)
    return replace(job, run_dir=run.path, begun=True)


def _is_of(run: RunDirectory, config: RunConfig, is_here: bool) -> bool:
    try:
        seed = OF_A_RUN.search(run.text())
        if seed is None or int(seed[1]) != config.seed:
            return False
        settings, device = run.settings(), run.device_kind()
    except (ConfigError, OSError, UnicodeDecodeError):  # damaged: no run that could go on
        return False
    if of_arm(as_recorded(config)) != of_arm(settings):
        return False
    if settings.get("gpus") != str(config.gpus):  # which a checkpoint is of, and what a sweep over them compares
        return False
    return (device is None or _kind(config, is_here) in (device, None)) and _asks_the_same(run, config)


def _asks_the_same(run: RunDirectory, config: RunConfig) -> bool:
    """Whether the files of the questions hold what they held when the run began."""
    try:
        then = run.environment().get("data") or {}
        now = preflight.questions(config) if then else {}
    except ConfigError:  # gone since: nothing else could be run in its place, and a job that is not done says why
        return True
    return all(then[key] == now[key] for key in ("training_sha256", "heldout_sha256") if key in then and key in now)


def _kind(config: RunConfig, is_here: bool) -> str | None:
    """`cpu` or `cuda`, as the job will run; None where another machine decides."""
    if config.device == "auto":
        return ("cuda" if preflight.has_gpu() else "cpu") if is_here else None
    return config.device


def _refuse_running(sweep: Path, run: RunDirectory) -> None:
    if (sweep / LOCK).exists():
        with locked(sweep):
            pass
    if run.is_claimed:
        with run.locked():
            pass


@contextmanager
def locked(sweep: Path) -> Iterator[None]:
    """Hold a sweep's directory, which is made where it is missing. Raises ConfigError where another command runs it."""
    make(sweep)
    with open(sweep / LOCK, "a", encoding="utf-8") as file:  # NFS locks what may be written only
        lock(
            file,
            f"another command runs the sweep in {sweep}. Wait for it or stop it first. For runs of its own type "
            "rerun=true, and another hydra.sweep.dir where you type one.",
        )
        yield


@contextmanager
def alone(plan: Plan) -> Iterator[None]:
    """Wait until no other command of this machine is between its look for runs of this sweep and its claim.

    Two that look at once would both find none. What is made for it is gone again where the body raises.
    """
    folder = plan.directory if plan.directory_given else plan.directory.parent
    made = first_missing(folder)
    if made and not made.parent.is_dir():  # below a file: the body says of which job
        yield
        return
    if made:
        make(folder)
    with alone_in(folder):
        try:
            yield
        except BaseException:
            if made and folder.is_dir():
                remove_empty(folder, made)
            raise


def write(plan: Plan) -> None:
    """Note the jobs of a sweep and what Hydra composed for it, unless its directory knows them already.

    What another grid began there stays noted, ahead of them.
    """
    own = {os.path.relpath(job.run_dir, plan.directory): job.overrides for job in plan.jobs}
    before = {os.path.relpath(path, plan.directory): words for path, words in _known(plan.directory).items()}
    if own.keys() <= before.keys():
        return
    replace_file(plan.directory / MASTER, OmegaConf.to_yaml(plan.sweep).encode())  # a machine may die here
    each = {path: words for path, words in before.items() if path not in own} | own
    jobs = [{"number": number, "words": words, "run_dir": path} for number, (path, words) in enumerate(each.items())]
    replace_file(plan.directory / INDEX, redact(json.dumps({"jobs": jobs}, indent=1)).encode())


def _known(directory: Path) -> dict[str, list[str]]:
    """Words of the jobs that the index notes, by the place of their runs; none where it cannot be read."""
    with suppress(ConfigError):
        return {os.path.normpath(directory / job["run_dir"]): job["words"] for job in _noted(directory)}
    return {}


def _noted(directory: Path) -> list[dict[str, Any]]:
    """The jobs of a sweep's index. Raises ConfigError for one that is damaged."""
    kinds, jobs = {"number": int, "words": list, "run_dir": str}, read_json(directory / INDEX, dict).get("jobs")
    if not isinstance(jobs, list) or not all(
        isinstance(job, dict) and all(isinstance(job.get(key), kind) for key, kind in kinds.items()) for job in jobs
    ):
        raise ConfigError(f"{directory / INDEX} is not what a sweep writes there. {_ANEW}")
    return jobs


def is_whole(plan: Plan) -> bool:
    """Tell whether a plan has every job that its directory knows, so that its table is that of the directory."""
    return {str(job.run_dir) for job in plan.jobs} >= _known(plan.directory).keys()


def read(directory: Path) -> Plan:
    """The plan of a sweep's directory, with the configurations that its runs have there.

    Raises ConfigError for a damaged record, for one that could run code, and where a run lies elsewhere: the line that
    began the sweep finds it there.
    """
    master = _master(directory)
    jobs = []
    for known in _noted(directory):
        run = RunDirectory(Path(os.path.normpath(directory / known["run_dir"])))
        if not run.path.is_relative_to(directory):  # a sweep that another gave could go on with any run of this user
            raise ConfigError(f"job {known['number']} of the sweep in {directory} lies outside, at {run.path}. {_ANEW}")
        if not run.is_claimed:
            raise ConfigError(f"job {known['number']} of the sweep in {directory} is not at {run.path}. {_ANEW}")
        composed = copy.deepcopy(master)
        with read_write(composed), open_dict(composed):
            composed.hydra.job.num = composed.hydra.job.id = known["number"]
            composed.hydra.overrides.task = known["words"]
        jobs.append(Job(known["number"], known["words"], run.config(), run.path, composed, begun=True))
    return Plan(jobs, directory, True, sweep=master)


def _master(directory: Path) -> DictConfig:
    """What Hydra composed for a sweep, typed again as its launchers want it.

    Raises ConfigError where it is damaged, and where it has settings of Hydra's that run code or reach the environment
    of the jobs: those act when the user types them, not when a directory holds them.
    """
    typed = OmegaConf.structured(HydraConf)
    OmegaConf.set_struct(typed, False)
    try:
        values: Any = OmegaConf.load(directory / MASTER)
        values.hydra = OmegaConf.merge(typed, values.hydra)
        hydra: Any = OmegaConf.to_container(values.hydra, resolve=False)  # an interpolation counts as set
        acting = {"hydra.callbacks": hydra["callbacks"], "hydra.job.env_set": hydra["job"]["env_set"]}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{directory / MASTER} cannot be read ({first_line(error)}). {_ANEW}") from None
    for name, value in acting.items():
        if value:
            raise ConfigError(f"{directory / MASTER} has {name}, which acts only where it is typed. {_ANEW}")
    return values
