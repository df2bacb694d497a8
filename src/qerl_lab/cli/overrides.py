"""Spell command-line overrides (`key=value`) for Hydra, check each, and turn Hydra's errors into messages."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from qerl_lab.cli.grammar import refuse_repeated_keys, unreadable_override_error
from qerl_lab.config.conf_folder import choices_of, default_option_by_group
from qerl_lab.config.keys import (
    NUMBERS,
    TEXT,
    TYPES,
    check_type,
    describe_type,
    field_of_key,
    spell_value,
    unknown_key_error,
)
from qerl_lab.config.message import first_line, in_one_line
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.spelling import quoted, shell_override, typed_override

NO_NAME = "Unsupported item value in defaults"  # Hydra's message if YAML read an option's name as a boolean
FLAGS = ("The --resolve flag", "Only one of --run")  # Hydra's messages about flags that exclude each other
SEVERAL = re.compile(r"(?:Ambiguous value for argument|Sweep parameters) '(.*)'")  # Hydra's message without -m
UNRESOLVED = re.compile(r"Error resolving interpolation '(.*)', possible")  # Hydra's message: the option of a group
NO_GROUP = re.compile(r"(In '[^']+': )Could not override '(\w+)'\. No match")  # Hydra's message about a defaults list
TWICE = re.compile(r"(?:Multiple values for )?(\w+)(?:\. To override| appears more than once)")  # likewise
# Hydra's messages about a YAML file of the user's that is not laid out as docs/configuration.md shows.
LAYOUT = re.compile(
    r"In '((?!hydra/)(\w+)/[^']+)': (?:Could not override '.+@|Could not find '\2/\w+/|[^\n]*\n"
    r"(?:Merge error: \w+ is not a subclass|(?:Cannot convert 'DictConfig'|Key '\2').*full_key: \2\n))",
    re.DOTALL,
)
APPENDED = ("experiment", "sweeps")  # groups outside the defaults list of conf/config.yaml
GROUPS = {  # the folders of conf/, and sweeps
    "experiment": "one arm of a comparison (+experiment=NAME)",
    "scale": "what it runs on and at what size; a group or key that you type wins over it",
    "model": "the policy",
    "format": "weight format of the policy's frozen base",
    "lora": "rank of the adapters that are trained; full trains all weights",
    "aqn": "adaptive quantization noise: how its standard deviation sigma falls over the run",
    "algorithm": "advantages and loss",
    "task": "questions and rewards",
    "rollout": "the engine that samples completions",
    "optim": "the optimizer",
    "tracking": "where the metrics go",
    "sweeps": "a grid of runs, as a file of sweeps/ (+sweeps=NAME)",
}
COMMANDS = {  # beside `python -m qerl_lab`: the module below qerl_lab, and what it does
    "report": "compare arms and test claims: tables, figures, a page",
    "evaluate": "accuracy on benchmarks, differences of two evaluations, entropy of formats, size of a sigma",
    "tools.samples": "completions of a run with their rewards",
    "tools.export": "the trained adapter for PEFT, transformers and vLLM, or a merged model",
    "tools.warmup": "teach a model the format of the answers before training",
    "quantize": "turn a model into a packed checkpoint",
    "tools.search": "search values of numeric keys by short sweeps",
    "tools.queue": "make many runs on machines that are lent for minutes",
    "tools.serve_line": "the command that starts the server of rollout=vllm_server",
    "tracking": "fill MLflow from a run directory; what each metric means",
    "bench": "speed and memory of rollouts and training",
    "config": "the tables of docs/configuration.md",
}


def spell_for_hydra(override: str) -> str:
    """Spell a typed override (`key=value`) for Hydra: quote a string value, add a plus to config groups of `APPENDED`.

    The user may type a plus or not: `experiment=x` and `+experiment=x` become the same. The value of `slurm` holds
    several flags and is quoted as one string. Hydra's own keys (`hydra.*`, `hydra/*`) keep their plus.
    """
    key, sign, value = override.lstrip("+").partition("=")
    if not sign or key.startswith("~"):
        return override
    if key.startswith(("hydra.", "hydra/")):
        return override if value.isdecimal() else typed_override(override.partition("=")[0], value)
    if key == "slurm" and value[:1] not in ("'", '"'):
        return f"{key}={quoted(value)}"
    if TYPES.get(key) in TEXT and key not in GROUPS:
        return typed_override(key, value)
    return f"{'+' if key in APPENDED else ''}{key}={value}"


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides that are spelled for Hydra (see `spell_for_hydra`).

    Raises ConfigError for an override that cannot be read, a key given twice, an unknown key, a value of a wrong type,
    or a feature of Hydra that no run can use, such as ~key. Does not check whether the option of a config group exists,
    because Hydra must read --config-dir first.
    """
    with as_config_errors():
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    for override in parsed:
        _check_override(override)
    refuse_repeated_keys((override.key_or_group, str(override.input_line)) for override in parsed)
    return parsed


def _check_override(override: Override) -> None:
    """Raise ConfigError for an unknown key, a value of a wrong type, or a feature of Hydra that no run can use."""
    name, line = override.key_or_group, override.input_line
    if override.is_hydra_override():
        if name == "hydra.run.dir":
            raise ConfigError(f"{line} does nothing here. Type run_dir=DIR for a run, hydra.sweep.dir=DIR for a sweep.")
        if name.startswith("hydra.sweeper.params"):  # Hydra cannot merge it
            raise ConfigError(f"{line} works in a file of sweeps/ only. Type -m KEY=a,b instead.")
        return
    if not name:
        raise unreadable_override_error(line, {})
    if name == "resume":  # the main command reads it before this check
        raise ConfigError(f"{line} continues a run, and here the overrides of a new run are needed. Leave resume out.")
    if override.package is not None:
        raise ConfigError(f"{line} would put an option where no run reads it. Type {name}=VALUE.")
    if override.is_delete():
        raise ConfigError(f"{line} would take away what every run has. Type {name}=VALUE to change it.")
    if name == "sweeps" and override.is_sweep_override():
        raise ConfigError(f"{line} is several sweeps, and a command runs one. Type +sweeps=NAME, a command for each.")
    field = None if name in GROUPS else field_of_key(name)
    is_glob = isinstance(override.value(), Glob)  # Hydra expands it to options of a config group later
    if override.is_sweep_override() and (not override.is_discrete_sweep() or (is_glob and field)):
        raise ConfigError(f"{line} is not a list of jobs. Type -m {name}=a,b with a value for each job.")
    if is_glob:
        return
    for value in _given_values(override):
        if field is None:
            if not isinstance(value, str):  # Hydra would compose several options, or none, or raise
                raise unknown_option_error(name, value, choices_of(name))
            continue
        if isinstance(value, str) and "${" in value:  # interpolations are checked after composition
            continue
        if type(value) in (int, float) and field.type in TEXT:
            value = str(value)  # a commit or a directory made of digits
        try:
            check_type(name, field, value)
        except ConfigError as error:
            if override.is_sweep_override():
                raise ConfigError(f"{line} is several values, because a comma separates them; {error}") from None
            several = _several_values(value) if field.type in NUMBERS else ""
            also = f", or -m {shlex.quote(f'{name}={several}')} for a run of each" if several else ""
            raise ConfigError(f"{str(error).removesuffix('.')}{also}.") from None


def _several_values(value: Any) -> str:
    """Format numbers in a list, or a range 0-2, 0:2 or 0..2, as a sweep: `0,1,2`, or `range(0,99)` if long; else ""."""
    if isinstance(value, list) and all(type(one) in (int, float) for one in value):
        return ",".join(map(spell_value, value))
    # Nine digits: a longer one is no count of runs, and int() and len() refuse the longest.
    ends = re.fullmatch(r"(\d{1,9})(?:-|:|\.\.)(\d{1,9})", str(value))
    if ends is None or int(ends[1]) >= int(ends[2]):
        return ""
    first, last = int(ends[1]), int(ends[2])
    return ",".join(map(str, range(first, last + 1))) if last - first < 10 else f"range({first},{last + 1})"


def _given_values(override: Override) -> list[Any]:
    """Return the value of an override, or each value of a sweep (`a,b`, choice(a,b), range(1,3)), without quotes."""
    if not override.is_sweep_override():
        return [override.value()]
    parser = OverridesParser.create()
    return [
        parser.parse_override(f"{override.key_or_group}={text}").value() for text in override.sweep_string_iterator()
    ]


def unknown_option_error(group: str, value: Any, options: list[str]) -> ConfigError:
    """Return the error for a value that is none of the `options` of a config group. The error says what to type.

    It suggests, for example, GROUP.path=VALUE for a path or a hub id, and lora.rank=256 for lora=rank256.
    """
    number = re.fullmatch(r"([a-z_]+)(\d+)", str(value))
    if "/" in str(value) and f"{group}.path" in TYPES:
        hint = f" Type {shell_override(f'{group}.path', value)}."
    elif number and f"{group}.{number[1]}" in TYPES:
        hint = f" Type {group}.{number[1]}={number[2]}."
    else:
        example = default_option_by_group().get(group, options[0])
        hint = did_you_mean(str(value), options) or f" Type for example {group}={example}."
    return ConfigError(f"{group}={spell_value(value)} is not an option; allowed: {', '.join(options)}.{hint}")


def overrides_of_runs(overrides: list[str]) -> list[str]:
    """Return `overrides` without those for Hydra's own settings and for the group `sweeps`."""
    return [line for line in overrides if not line.startswith(("hydra.", "hydra/", "+sweeps="))]


@contextmanager
def as_config_errors() -> Iterator[None]:
    """Context manager: re-raise errors of Hydra (one is a plain ValueError), OmegaConf and YAML as ConfigError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(explain(error)) from None
    except ValueError as error:
        if not str(error).startswith((NO_NAME, *FLAGS)):
            raise
        raise ConfigError(explain(error)) from None


def explain(error: Exception) -> str:
    """Return the message to show for an error of Hydra, OmegaConf or the YAML reader."""
    match error:
        case ConfigError():
            return str(error)
        case HydraException() if found := LAYOUT.match(str(error)):
            return (
                f"{found[1]}.yaml is not laid out as Hydra reads it. Write # @package _global_ as its first line, "
                "override /GROUP: OPTION in its defaults list, and each key indented below its group "
                "(docs/configuration.md has a whole file)."
            )
        case ConfigCompositionException() if found := SEVERAL.match(str(error)):
            return (
                f"{found[1].lstrip('+')} is several values, and this command runs one job. Type -m to run a job for "
                "each, or two pairs of quotes if the comma is part of a text: \"KEY='a, b'\"."
            )
        case ConfigCompositionException() if found := UNRESOLVED.match(str(error)):
            why = first_line(error.__context__ or error)
            return f"{found[1]} names no option of a group ({why}). Type the option, for example format=nvfp4."
        case ConfigCompositionException() if found := NO_GROUP.match(str(error)):
            return f"{found[1]}{unknown_key_error(found[2])}"
        case ConfigCompositionException() if found := TWICE.match(str(error)):
            return f"a defaults list of --config-dir has {found[1]} again. Write override /{found[1]}: OPTION there."
        case OverrideParseException() if error.override in choices_of("experiment"):
            return f"{error.override} cannot be read as KEY=VALUE. Type +experiment={error.override}."
        case OverrideParseException() if error.override in COMMANDS:
            return f"{error.override} is a command of its own. Type python -m qerl_lab.{error.override}."
        case OverrideParseException():
            return str(unreadable_override_error(error.override, dict(TYPES) | dict.fromkeys(GROUPS)))
        case MissingConfigException() if error.missing_cfg_file and error.options:
            file = str(error.missing_cfg_file)  # an option that is a path has slashes of its own
            group = next((name for name in GROUPS if file.startswith(f"{name}/")), file.rpartition("/")[0])
            option = file.removeprefix(f"{group}/")
            return str(unknown_option_error(group, option, list(error.options)))
        case HydraException() if error.__cause__ and "HYDRA_FULL_ERROR" in str(error):  # which changes nothing here
            return in_one_line(error.__cause__)
        case ValueError() if str(error).startswith(NO_NAME):
            return (
                f"a defaults list of --config-dir cannot be read ({first_line(error)}): YAML takes off, on, yes and no "
                'for truth values. Write them in quotes, for example override /aqn: "off".'
            )
    for cause in (error, error.__cause__, error.__context__):
        if isinstance(cause, OmegaConfBaseException) and cause.full_key:
            place = re.match(r"In '[^']+': ", str(error))
            return (place[0] if place else "") + _explain_key(cause, cause.full_key)
    return " ".join((str(error) or str(error.__cause__)).split())


def _explain_key(error: OmegaConfBaseException, key: str) -> str:
    """Return the message for OmegaConf's error about `key`, if its value came from a YAML file or an interpolation."""
    key = re.sub(r"\[\d+\]$", "", key)  # an item of a list
    problem = f"{key}: {first_line(error).rstrip('.')}"
    if key.startswith("hydra."):
        return f"{problem}."
    try:
        return f"{problem}; allowed: {describe_type(field_of_key(key).type)}, or ${{KEY}} with the name of another key."
    except ConfigError as unknown:
        return str(unknown)
