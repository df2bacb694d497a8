"""From the words of a command line to checked jobs, before anything starts. Imports Hydra and no torch.

Every job of a command is composed exactly as Hydra's launcher will compose it later, then validated, so that one bad
job of a sweep stops the command before its first. Whatever is wrong ends in one `ConfigError`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from qerl_lab.checks import check_key, check_type, schema, type_words, typed
from qerl_lab.config import ConfigError, RunConfig, choices_of, did_you_mean, from_dict, package_data

VERSION_BASE = "1.3"
APPENDED = ("experiment", "sweeps")  # groups outside the defaults list of conf/config.yaml


@dataclass(frozen=True)
class Job:
    """One run to be: what was typed for it, its checked configuration and its own directory."""

    number: int
    overrides: list[str]
    config: RunConfig
    run_dir: Path


@dataclass(frozen=True)
class Plan:
    """What a command would run; `directory` is the run's, or the sweep's with a directory of each job in it."""

    jobs: list[Job]
    multirun: bool
    directory: Path
    directory_given: bool  # named on the command line, so not to be renamed when it exists


def groups() -> list[str]:
    """Every configuration group: the folders of conf/, and sweeps."""
    return [*sorted(path.name for path in package_data("conf").iterdir() if path.is_dir()), "sweeps"]


def spell(override: str) -> str:
    """The one place where `experiment=x`, `+experiment=x`, `scale=x` and `+scale=x` become what Hydra takes.

    Hydra wants a plus before what the defaults list lacks (`APPENDED`) and none before what exists, which the schema
    makes everything else. Its own keys (`hydra.*`, `hydra/*`) stay as they are typed.
    """
    key = override.partition("=")[0].lstrip("+")
    rest = override[override.index(key) + len(key) :]
    if key.startswith(("hydra.", "hydra/", "~")):
        return override
    return f"+{key}{rest}" if key in APPENDED else f"{key}{rest}"


@cache
def register() -> None:
    """Give Hydra the typed schema and the files of sweeps/, which lie outside conf/."""
    store = ConfigStore.instance()
    store.store("schema", RunConfig)
    for path in sorted(package_data("sweeps").glob("*.yaml")):
        store.store(path.stem, OmegaConf.load(path), group="sweeps", package="_global_")


def make_plan(overrides: list[str], multirun: bool, config_dir: str | None = None) -> Plan:
    """Compose and validate every job of a command whose overrides are spelled for Hydra. Raises ConfigError."""
    with _as_config_errors(), _loader(config_dir) as loader:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(overrides)
        for override in parsed:
            check_override(override, loader, _searchpath(overrides))
        _refuse_twice(parsed)
        if not multirun and not any(override.is_sweep_override() for override in parsed):
            cfg = loader.load_configuration("config", overrides, RunMode.RUN)
            if cfg.hydra.mode != RunMode.MULTIRUN:
                return _single_plan(cfg)
        master = loader.load_configuration("config", overrides, RunMode.MULTIRUN, validate_sweep_overrides=False)
        if not multirun and master.hydra.mode != RunMode.MULTIRUN:
            _refuse_sweeps(parsed)
        return _sweep_plan(master, loader)


@contextmanager
def _loader(config_dir: str | None) -> Iterator[ConfigLoader]:
    """A loader that sees what hydra.main will see: our conf/, the user's --config-dir, the schema and the sweeps."""
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir} is not a directory. Type one that has groups, e.g. experiment/.")
    register()
    with initialize_config_dir(str(package_data("conf")), job_name="qerl_lab", version_base=VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        if config_dir:  # the same place in the search path as hydra.main gives it
            path = loader.get_search_path()
            path.prepend("command-line", f"file://{Path(config_dir).absolute()}", SearchPathQuery(provider="schema"))
            loader = ConfigLoaderImpl(path)
        yield loader


def _single_plan(cfg: DictConfig) -> Plan:
    config = job_config(cfg)
    HydraConfig.instance().set_config(cfg)
    run_dir = Path(config.run_dir or str(cfg.hydra.run.dir)).absolute()
    given = bool(config.run_dir) or _sets(cfg, "hydra.run.dir")
    return Plan([Job(0, _shown(cfg.hydra.overrides.task), config, run_dir)], False, run_dir, given)


def _sweep_plan(master: DictConfig, loader: ConfigLoader) -> Plan:
    directory, jobs = Path(str(master.hydra.sweep.dir)).absolute(), []
    for number, overrides in enumerate(_expand(master, loader)):
        try:
            cfg = loader.load_sweep_config(master, overrides)
            config = job_config(cfg)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            raise ConfigError(f"job {number} ({' '.join(_shown(overrides))}): {_explain(error)}") from None
        if config.run_dir:
            raise ConfigError(
                f"run_dir={config.run_dir} cannot serve a sweep, whose jobs get a directory each. "
                f"Type hydra.sweep.dir={config.run_dir}."
            )
        jobs.append(Job(number, _shown(overrides), config, directory / _subdirectory(cfg, number)))
    _refuse_shared_directories(jobs)
    return Plan(jobs, True, directory, _sets(master, "hydra.sweep.dir"))


def _sets(cfg: DictConfig, key: str) -> bool:
    return any(line.lstrip("+").startswith(f"{key}=") for line in cfg.hydra.overrides.hydra)


def _expand(master: DictConfig, loader: ConfigLoader) -> list[list[str]]:
    """The overrides of every job, in Hydra's order: its own sweeper splits them, from the same lines."""
    if master.hydra.runtime.choices["hydra/sweeper"] != "basic":
        raise ConfigError(
            f"hydra/sweeper={master.hydra.runtime.choices['hydra/sweeper']} picks its jobs while it runs, so they "
            "cannot be checked before the first starts; allowed: basic. Leave hydra/sweeper out."
        )
    params = [f"{key}={value}" for key, value in (master.hydra.sweeper.params or {}).items()]
    for line in params:
        if line != spell(line):
            raise ConfigError(f"hydra.sweeper.params has {line}; write {spell(line).partition('=')[0]} there.")
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(params + list(master.hydra.overrides.task))
    for override in parsed:
        check_override(override, loader, _searchpath(master.hydra.overrides.hydra))
    jobs = [job for batch in BasicSweeper.split_arguments(parsed, master.hydra.sweeper.max_batch_size) for job in batch]
    if not jobs:
        raise ConfigError("the sweep has no job: one of its lists or globs is empty.")
    return jobs


def _subdirectory(cfg: DictConfig, number: int) -> str:
    """hydra.sweep.subdir as the launcher will read it for this job."""
    with open_dict(cfg):
        cfg.hydra.job.num = cfg.hydra.job.id = number
    HydraConfig.instance().set_config(cfg)
    return str(cfg.hydra.sweep.subdir)


def _refuse_shared_directories(jobs: list[Job]) -> None:
    seen: dict[Path, int] = {}
    for job in jobs:
        other = seen.setdefault(job.run_dir, job.number)
        if other != job.number:
            raise ConfigError(
                f"jobs {other} and {job.number} would share the run directory {job.run_dir}; hydra.sweep.subdir must "
                "differ between jobs. Leave it out, or put ${hydra.job.num} in it."
            )


def job_config(cfg: DictConfig) -> RunConfig:
    """The checked RunConfig of one composed job, with or without Hydra's own node."""
    values = {}
    for key in cfg:
        if key != "hydra":
            node = cfg[key]
            values[str(key)] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    config = from_dict(values)
    if config.model.name == "pocket" and config.model.path != "pocket":
        config.model.name = Path(config.model.path).name  # model.path= alone must not label the run "pocket"
    return config


def check_override(override: Override, loader: ConfigLoader, search: list[str]) -> None:
    """ConfigError for an override whose key or value cannot be right, whatever it is combined with."""
    name = override.key_or_group
    if override.is_hydra_override():
        if override.is_sweep_override():
            raise ConfigError(f"{override.input_line} would sweep over Hydra's own settings. Type {name}=VALUE, once.")
        return
    if override.is_delete():
        raise ConfigError(f"{override.input_line} would take away what every run has. Type {name}=VALUE to change it.")
    if getattr(override.value(), "shuffle", False):
        raise ConfigError(f"{override.input_line} gives the jobs another order each time. Leave shuffle() out.")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{override.input_line} is not a list of jobs. Type {name}=a,b or {name}=range(1,4).")
    if name in groups():
        for value in _values(override):
            _check_option(name, value, loader.get_group_options(name, overrides=search))
    else:
        kind = check_key(name)
        for value in _values(override):
            _check_value(name, kind, value)


def _searchpath(lines: list[str]) -> list[str]:
    """What the user typed of further places with options; listing a group's options needs it."""
    return [line for line in lines if line.lstrip("+").startswith("hydra.searchpath=")]


def _values(override: Override) -> list[Any]:
    if not override.is_sweep_override():
        return [override.value()]
    return [value.text if isinstance(value, QuotedString) else value for value in override.sweep_iterator()]


def _check_option(group: str, value: Any, options: list[str]) -> None:
    if value in options:
        return
    hint = did_you_mean(str(value), options) or f" Type for example {group}={options[0]}."
    if isinstance(value, dict):
        hint = f" Set its keys one by one, for example {group}.{next(iter(value), 'name')}=VALUE."
    raise ConfigError(f"{group}={typed(value)} is not an option; allowed: {', '.join(options)}.{hint}")


def _check_value(name: str, kind: Any, value: Any) -> None:
    if isinstance(value, str) and "${" in value:
        return  # an interpolation: its value is known, and checked, after composition
    if type(value) in (int, float) and kind in (str, str | None):
        value = str(value)  # a commit or a directory made of digits
    check_type(name, kind, value)


def _refuse_sweeps(overrides: list[Override]) -> None:
    override = next(override for override in overrides if override.is_sweep_override())
    name, value = override.key_or_group, override.get_value_string()
    one = f", or \"{name}='{value}'\" if the comma is part of it" if name in schema() else ""
    raise ConfigError(
        f"{name}={value} is several values, and this command runs one job. Type -m to run a job for each{one}."
    )


def _refuse_twice(overrides: list[Override]) -> None:
    for group in APPENDED:
        lines = [override.input_line for override in overrides if override.key_or_group == group]
        if len(lines) > 1:
            raise ConfigError(f"{group} is given {len(lines)} times: {' '.join(map(str, lines))}. Type one of them.")


def quoted(value: str) -> str:
    """A text as one value in Hydra's override grammar."""
    return "'" + value.replace("'", "\\'") + "'"


def _shown(overrides: list[str]) -> list[str]:
    """The overrides that tell the jobs of a command apart: not Hydra's own, not the name of the sweep."""
    return [line for line in overrides if not line.startswith(("hydra.", "hydra/", "+sweeps="))]


@contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_explain(error)) from None


def _explain(error: Exception) -> str:
    """One message for whatever Hydra, OmegaConf or the YAML reader found wrong."""
    match error:
        case ConfigError():
            return str(error)
        case OverrideParseException() if error.override in choices_of("experiment"):
            return f"{error.override} cannot be read as KEY=VALUE. Type +experiment={error.override}."
        case OverrideParseException():
            return (
                f"{error.override} cannot be read. Type KEY=VALUE, and put a value that has one of , = ( ) [ ] {{ }} "
                f"or spaces in it between quotes, inside the shell's: \"KEY='a, b'\"."
            )
        case MissingConfigException() if error.missing_cfg_file and error.options:
            group, _, option = str(error.missing_cfg_file).rpartition("/")
            hint = did_you_mean(option, list(error.options))
            if group == "hydra/launcher":
                hint = " More of them come with: pip install 'qerl-lab[sweeps]'."
            return f"{group}={option} is not an option; allowed: {', '.join(error.options)}.{hint}"
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            place = re.match(r"In '[^']+': ", str(error))
            return (place[0] if place else "") + _explain_key(cause, cause.full_key)
    return " ".join((str(error) or str(error.__cause__)).split())


def _explain_key(error: OmegaConfBaseException, key: str) -> str:
    """What a YAML file or an interpolation gives to a key that the schema lacks or types otherwise."""
    said = f"{key}: {str(error).splitlines()[0].rstrip('.')}"
    if key.startswith("hydra."):
        return f"{said}."
    try:
        return f"{said}; allowed: {type_words(check_key(key))}."
    except ConfigError as unknown:
        return str(unknown)
