"""Compose and check every job of a command before the first one starts. Imports Hydra and no torch.

`plan_run` and `plan_sweep` take what Hydra composed (`@hydra.main` in `train.py`); `make_plan` composes by itself.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from hydra.utils import get_class
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from qerl_lab.cli import intent
from qerl_lab.cli.overrides import as_config_errors, explain, overrides_of_runs, parse_overrides, spell_for_hydra
from qerl_lab.config.arm import OF_SWEEPS, values_of
from qerl_lab.config.conf_folder import choices_of, group_folder, package_data
from qerl_lab.config.keys import NUMBERS, TYPES, spell_value, unknown_key_error
from qerl_lab.config.message import some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import build_config, validate
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import shell_override

VERSION_BASE = "1.3"


@dataclass(frozen=True)
class Job:
    """A run to start: its checked configuration, its directory, and the overrides (`key=value`) typed for it.

    `number` counts the jobs of a command from 0.
    """

    number: int
    overrides: list[str]
    config: RunConfig
    run_dir: Path
    notes: list[str] = field(default_factory=list)  # printed before the job starts
    begun: bool = False  # an earlier command created `run_dir`


@dataclass(frozen=True)
class Plan:
    """The jobs of a command: of a single run, or of a sweep (`multirun`).

    `directory` is the directory of the run or of the sweep. A sweep's directory holds a directory per job.
    """

    jobs: list[Job]
    directory: Path
    directory_is_fixed: bool  # the user typed it, or an earlier sweep has it; else NAME-2 is used if it exists
    multirun: bool


@cache
def register_schema_and_sweeps() -> None:
    """Register with Hydra the schema RunConfig, and the files of sweeps/, because they lie outside of conf/."""
    store = ConfigStore.instance()
    store.store("schema", RunConfig)
    for path in sorted(group_folder("sweeps").glob("*.yaml")):
        store.store(path.stem, OmegaConf.load(path), group="sweeps", package="_global_")


def make_plan(overrides: Iterable[str], multirun: bool) -> Plan:
    """Compose and check every job of a command without starting any; return the plan.

    `overrides` are the overrides as a user types them. `multirun` is the flag -m. Without -m, an override such as
    +sweeps=NAME still plans a sweep. Raises ConfigError if an override or a job is not allowed.
    """
    overrides = [spell_for_hydra(word) for word in overrides]
    parsed = parse_overrides(overrides)
    register_schema_and_sweeps()
    with (
        as_config_errors(),
        initialize_config_dir(str(package_data("conf")), job_name="qerl_lab", version_base=VERSION_BASE),
    ):
        loader = GlobalHydra.instance().config_loader()
        master = loader.load_configuration("config", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        if multirun or master.hydra.mode == RunMode.MULTIRUN:
            return plan_sweep(master, loader)
        loader.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        return plan_run(master, loader)


def plan_run(cfg: DictConfig, loader: ConfigLoader) -> Plan:
    """Check the single run that Hydra composed as `cfg`; return a plan with this job and its directory.

    Raises ConfigError if the run cannot start, or if an override has no effect or is only for sweeps.
    """
    _refuse_shadowed_files(cfg)
    typed = _typed_words(cfg.hydra.overrides.task)
    job = _checked_job(0, cfg, typed, loader)
    # A single run may have jobs_per_gpu: it says that runs started by hand share the GPU.
    sweep_keys = {*OF_SWEEPS} - {"jobs_per_gpu"}
    only_for_sweeps = [word for word in job.overrides if word.partition("=")[0] in sweep_keys]
    only_for_sweeps += [
        word for word in _typed_words(cfg.hydra.overrides.hydra) if word.lstrip("+").startswith("hydra.sweep.")
    ]
    if only_for_sweeps:
        raise ConfigError(
            f"{only_for_sweeps[0]} is for sweeps, and this command runs one job. "
            "Leave it out, or add -m for a sweep of one."
        )
    if cfg.hydra.sweeper.params:
        raise ConfigError(
            "a file has a grid (hydra.sweeper.params), and this command runs one job. "
            "Add -m, or write mode: MULTIRUN beside sweeper in the file."
        )
    intent.refuse_inert_overrides([(job.config, intent.overrides_by_key(typed))])
    usual = f"runs/{job.config.experiment}/seed{job.config.seed}/{time.strftime('%Y%m%d-%H%M%S')}"
    run_dir = Path(job.config.run_dir or usual).expanduser().absolute()
    is_typed = bool(job.config.run_dir)
    return Plan([replace(job, run_dir=run_dir)], run_dir, directory_is_fixed=is_typed, multirun=False)


def plan_sweep(master: DictConfig, loader: ConfigLoader) -> Plan:
    """Expand the sweep that Hydra composed as `master` into jobs; compose and check each; return the plan.

    Leaves the last job in the global HydraConfig. Raises ConfigError if a job cannot start, two jobs are equal or
    conflict, or an override has no effect.
    """
    _refuse_shadowed_files(master)
    if not str(master.hydra.sweep.dir).strip():  # a variable of the shell that is not set; as a path this directory
        raise ConfigError("hydra.sweep.dir= is empty; allowed: a directory. Leave hydra.sweep.dir out.")
    directory, jobs = Path(str(master.hydra.sweep.dir)).expanduser().absolute(), list[Job]()
    for number, overrides in enumerate(_expand_sweep(master, loader)):
        try:
            cfg = loader.load_sweep_config(master, overrides)
            job = _checked_job(number, cfg, overrides, loader)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            line = " ".join(overrides_of_runs(overrides))
            raise ConfigError(f"job {number} ({line}): {explain(error)}") from None
        if job.config.run_dir:
            raise ConfigError(
                f"run_dir={job.config.run_dir} is for one run, and each job of a sweep has its own directory. "
                f"Type {shell_override('hydra.sweep.dir', job.config.run_dir)}."
            )
        with open_dict(cfg):
            cfg.hydra.job.num = cfg.hydra.job.id = number
        HydraConfig.instance().set_config(cfg)
        run_dir = directory / (subdir := str(cfg.hydra.sweep.subdir))
        if Path(os.path.normpath(directory)) not in Path(os.path.normpath(run_dir)).parents:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir} is not inside the sweep's directory, so resume and report would not find "
                "the run there; allowed: a relative path without dots. Leave hydra.sweep.subdir out."
            )
        jobs.append(replace(job, run_dir=run_dir))
    _refuse_equal_jobs(jobs)
    intent.refuse_conflicting_jobs([job.config for job in jobs])
    intent.refuse_inert_overrides([(job.config, intent.overrides_by_key(job.overrides)) for job in jobs])
    typed = intent.overrides_by_key(_typed_words(master.hydra.overrides.hydra))
    return Plan(jobs, directory, directory_is_fixed="hydra.sweep.dir" in typed, multirun=True)


def _refuse_equal_jobs(jobs: Sequence[Job]) -> None:
    """Raise ConfigError if two jobs of a sweep have the same run directory, or the same configuration."""
    first_by_directory: dict[Path, int] = {}  # run directory -> number of the first job that has it
    first_by_config: dict[str, int] = {}  # configuration as text -> number of the first such job
    for job in jobs:
        if (other := first_by_directory.setdefault(job.run_dir, job.number)) != job.number:
            raise ConfigError(
                f"jobs {other} and {job.number} would share the run directory {job.run_dir}; allowed: a value that "
                "differs between jobs. Leave hydra.sweep.subdir out, or type 'hydra.sweep.subdir=${hydra.job.num}'."
            )
        if (other := first_by_config.setdefault(repr(job.config), job.number)) != job.number:
            raise ConfigError(
                f"jobs {other} and {job.number} are the same run ({' '.join(job.overrides)}). "
                "Leave out one of the two values: they are equal, or the arm or the scale sets that key itself."
            )


def _refuse_shadowed_files(cfg: DictConfig) -> None:
    """Refuse a user's file with the name of one of ours, such as experiment/bf16.yaml: Hydra reads only one of the two.

    `cfg` is what Hydra composed; it lists the folders that Hydra searches. Raises ConfigError.
    """
    ours = package_data("conf").resolve()
    for folder in (Path(source.path) for source in cfg.hydra.runtime.config_sources if source.schema == "file"):
        if folder.resolve() == ours:
            continue
        files = [file for file in sorted(folder.glob("*/*.yaml")) if file.stem in choices_of(file.parent.name)]
        if files:
            given = f"{folder} has {some_of([f'{file.parent.name}/{file.name}' for file in files])}, as the lab does"
            raise ConfigError(f"{given}, and only one of the two would be read. Give yours another name.")


def _checked_job(number: int, cfg: DictConfig, overrides: list[str], loader: ConfigLoader) -> Job:
    """Build job `number` from `cfg`, which Hydra composed with `overrides`, and check it. Leaves `run_dir` empty.

    Raises ConfigError if the job cannot run with these overrides.
    """
    typed = intent.overrides_by_key(overrides)
    config = job_config(cfg, typed)
    intent.check_overrides(config, typed)
    _refuse_misnamed_files(config, cfg.hydra.runtime.choices)
    _refuse_mislabelled_experiment(config, typed, cfg, loader)
    notes = intent.notes_before_start(config, cfg.optim.micro_batch_size, typed)
    return Job(number, overrides_of_runs(overrides), config, Path(), notes)


def _refuse_misnamed_files(config: RunConfig, choices: Mapping[str, str | None]) -> None:
    """Refuse the file of an arm or a scale if its runs would not be called like the file, or if differs_in is wrong.

    differs_in may hold only known keys. `choices` maps the groups of `config` to their options. Raises ConfigError.
    """
    for group in ("experiment", "scale"):
        option, name = choices.get(group), getattr(config, group)
        if option is None:
            continue
        own = Path(option).name  # an option may be in a folder of its group
        if name != own:
            raise ConfigError(f"runs of {group}={option} would be called {name}. Write {group}: {own} in its file.")
    if unknown := [key for key in config.differs_in if key not in TYPES]:
        raise ConfigError(f"differs_in of experiment={config.experiment}: {unknown_key_error(unknown[0])}")


def _refuse_mislabelled_experiment(
    config: RunConfig, typed: Mapping[str, str], cfg: DictConfig, loader: ConfigLoader
) -> None:
    """Refuse a typed override that changes what experiment=NAME means, because the run would keep that name.

    `config` is the job's configuration, `cfg` the same as Hydra composed it. `typed` maps typed keys to their values.
    Raises ConfigError.
    """
    own_keys = {key for key in config.differs_in if TYPES[key] not in NUMBERS}
    arm, declared = cfg.hydra.runtime.choices.get("experiment"), sorted(own_keys | _experiment_keys())
    # A typed group, such as format, changes the declared keys in it.
    suspects = [key for key in typed if any(f"{name}.".startswith(f"{key}.") for name in declared)]
    if arm is None or not suspects:
        return
    paths = [word for word in _typed_words(cfg.hydra.overrides.hydra) if "hydra.searchpath=" in word]
    composed = loader.load_configuration("config", [f"+experiment={arm}", *paths], RunMode.RUN)
    now, defined, usual = values_of(config), values_of(job_config(composed, {})), values_of(RunConfig())
    if changed := [key for key in declared if now[key] != defined[key]]:
        words = " ".join(f"{key}={typed[key]}" for key in suspects)
        meant = ", ".join(f"{key}={spell_value(defined[key])}" for key in changed)
        instead = " ".join(f"{key}={spell_value(now[key])}" for key in declared if now[key] != usual[key])
        also = f" and type {instead}" if instead else ""
        raise ConfigError(
            f"{words} changes what experiment={arm} stands for ({meant}), and the run would keep its name. "
            f"Leave {words} out, or leave experiment={arm} out{also}."
        )


@cache
def _experiment_keys() -> frozenset[str]:
    """Return all keys that files of conf/experiment/ list in `differs_in`, i.e. keys that tell experiments apart.

    Keys of a numeric type are left out, because their values are fitted to a model.
    """
    files = group_folder("experiment").glob("*.yaml")
    declared = {key for file in files for key in yaml.safe_load(file.read_text(encoding="utf-8"))["differs_in"]}
    return frozenset(key for key in declared if TYPES[key] not in NUMBERS)


def _typed_words(overrides: ListConfig) -> list[str]:
    """Return Hydra's list of overrides as text, without resolving interpolations such as `${hydra.job.num}`."""
    words: Any = OmegaConf.to_container(overrides, resolve=False)
    return list(words)


def _expand_sweep(master: DictConfig, loader: ConfigLoader) -> list[list[str]]:
    """List the overrides of each job of the sweep that Hydra composed as `master`, in Hydra's order.

    Raises ConfigError if the sweep has no job, or sets Hydra's sweeper in a way that is not allowed.
    """
    if (size := master.hydra.sweeper.get("max_batch_size")) is not None:
        raise ConfigError(f"hydra.sweeper.max_batch_size={size} does nothing here. Type jobs={size}.")
    if (name := master.hydra.runtime.choices["hydra/sweeper"]) != "basic":
        raise ConfigError(
            f"hydra/sweeper={name} chooses jobs while it runs, so the lab cannot check them before the first starts; "
            "allowed: basic. Leave hydra/sweeper out."
        )
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    for line in params:
        key = spell_for_hydra(line).partition("=")[0]
        if key != line.partition("=")[0]:
            raise ConfigError(f"hydra.sweeper.params has {line}; write {key} there.")
    parse_overrides(params)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(
        params + _typed_words(master.hydra.overrides.task)
    )
    basic_sweeper: Any = get_class(master.hydra.sweeper._target_)
    jobs: list[list[str]]
    (jobs,) = basic_sweeper.split_arguments(parsed, max_batch_size=None)
    if not jobs:
        raise ConfigError(
            "the sweep has no job, because one of its lists or globs is empty. Type at least one value for each key."
        )
    return jobs


def job_config(cfg: DictConfig, typed: Mapping[str, str]) -> RunConfig:
    """Return the checked RunConfig of a job from `cfg`, which Hydra composed, with implied values filled in.

    `typed` maps typed keys to their values; typed values win over implied ones (see `intent.with_implied_values`).
    Raises ConfigError if the configuration cannot run.
    """
    values: dict[str, Any] = {}
    for key in cfg:  # one by one, because a copy without hydra could not resolve ${hydra.runtime.cwd} in a value
        if key != "hydra":
            node = cfg[key]
            values[str(key)] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    config = intent.with_implied_values(build_config(values), typed)
    validate(config)
    return config
