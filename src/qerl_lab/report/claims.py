"""Read claims, each with its test, from YAML; `results/reference/claims.yaml` has the claims of the QeRL paper.

A claim says how an arm differs from another in a measure. A sweep can have its own claims file, committed before the
runs; then each run records the file's SHA-256 (`preregistration=FILE`). `docs/verdicts.md` describes the fields.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from qerl_lab.config.arm import OF_OVERLAP, is_of_arm
from qerl_lab.config.conf_folder import choices_of, package_data
from qerl_lab.config.fields import DAY, DIRECTION, LIST, MAPPING, NUMBER, TEXT, WHOLE, check_fields, parse_number
from qerl_lab.config.keys import FIELDS, TYPES, check_type
from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError, check_bounds, did_you_mean
from qerl_lab.config.paths import QUEUE, sha256
from qerl_lab.report import reference
from qerl_lab.report.measures import MEASURES
from qerl_lab.report.stats import format_change

Settings = Mapping[str, str]
KEYS = {key for key in FIELDS if is_of_arm(key)} | {"device", *OF_OVERLAP}  # all that `Run.settings` may have
KEYS_AND_GROUPS = {*KEYS, *(name.rpartition(".")[0] for name in KEYS)} - {""}  # such as lora.rank and lora
FEWEST_SEEDS = 2  # an interval needs two seeds

OF_FILE = {"committed": DAY, "seeds": WHOLE, "claims": LIST}
OPTIONAL_OF_FILE = {"conditions": MAPPING, "analysis": TEXT, "arms": MAPPING}
OF_CLAIM = {
    "name": TEXT, "says": TEXT, "where": TEXT, "family": TEXT, "measure": TEXT, "direction": DIRECTION,
    "smallest": NUMBER, "reason": TEXT, "contrasts": LIST, "free": LIST, "sweep": TEXT,
}  # fmt: skip
OPTIONAL_OF_CLAIM = {"guardrail": MAPPING, "best_of": TEXT, "mean_over": TEXT, "added": DAY}
OF_GUARDRAIL = {"measure": TEXT, "margin": NUMBER}
OF_CONTRAST, OPTIONAL_OF_CONTRAST = {"treated": TEXT, "control": TEXT}, {"printed": LIST}
OF_PRINTED = {"where": MAPPING, "treated": MAPPING, "control": MAPPING}


@dataclass(frozen=True)
class Contrast:
    """A comparison of two arms, treated and control, each given by name and settings.

    `printed` has the paper's effects by source: factors for a ratio, else differences.
    """

    treated: str
    control: str
    treated_settings: Settings
    control_settings: Settings
    printed: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """Return `TREATED against CONTROL`, the contrast's name in tables."""
        return f"{self.treated} against {self.control}"


@dataclass(frozen=True)
class Guardrail:
    """A limit on side effects: `measure` may be lower in the treated arm than in the control by at most `margin`."""

    measure: str
    margin: float


@dataclass(frozen=True)
class ClaimsFile:
    """A file of claims: what all of them share."""

    path: str  # the file's name in messages; do not open it, because the paper's claims lie inside the package
    sha256: str
    committed: str  # the day of the first commit
    seeds: int  # how many seeds both arms of a contrast must have in common
    conditions: Settings  # settings that all runs must have; other runs are ignored
    analysis: str = ""  # other planned analysis, in words
    queue: str = ""  # the queue file beside the claims file, as messages name it; empty without one


@dataclass(frozen=True)
class Claim:
    """One claim of a file, with its test."""

    name: str
    says: str  # the claim in words
    where: str  # the place in the paper
    family: str  # contrasts of one family are corrected together for multiple tests (Holm)
    measure: str
    direction: int  # 1 if the claim says that the measure rises, -1 falls, 0 stays within `smallest`
    smallest: float  # the smallest effect that matters, in the measure's unit; for a ratio a factor above 1
    reason: str  # why `smallest` has this value
    contrasts: tuple[Contrast, ...]
    free: tuple[str, ...]  # keys and groups of keys that may differ between the arms of a contrast
    sweep: str  # runs the arms (`+sweeps=SWEEP`)
    file: ClaimsFile
    guardrail: Guardrail | None = None
    best_of: str = ""  # a key; each arm is measured at the value that is best for it
    mean_over: str = ""  # a key; each seed's effect is averaged over the values that both arms have
    added: str = ""  # the day on which the claim was added to a file committed earlier

    @property
    def swept_key(self) -> str:
        """Return the key with several values in an arm, `best_of` or `mean_over`; "" if the claim has neither."""
        return self.best_of or self.mean_over

    def is_free(self, key: str) -> bool:
        """Tell whether the arms of a contrast may differ in a key, because `free` has it or its group."""
        return any(key == name or key.startswith(f"{name}.") for name in self.free)

    @property
    def is_ratio(self) -> bool:
        """Tell whether effects are ratios (treated / control), compared by their logarithms, instead of differences."""
        return MEASURES[self.measure].is_ratio

    @property
    def margin(self) -> float:
        """Return the smallest effect that matters as tests use it: `smallest`, or for a ratio its logarithm."""
        return math.log(self.smallest) if self.is_ratio else self.smallest

    @property
    def smallest_as_text(self) -> str:
        """Format `smallest`, the smallest effect that matters: `0.02` for a difference, `1.1x` for a ratio."""
        return f"{self.smallest:g}x" if self.is_ratio else f"{self.smallest:g}"

    def format_effect(self, effect: float) -> str:
        """Format an effect for readers: `+0.013` for a difference, `1.23x` for a ratio."""
        return f"{effect:.2f}x" if self.is_ratio else format_change(effect)


@cache
def of_paper() -> tuple[Claim, ...]:
    """Read the claims of the QeRL paper from results/reference/claims.yaml."""
    return read(package_data("results/reference") / "claims.yaml", "results/reference/claims.yaml")


def read(path: Path, called: str, key: str = "claims") -> tuple[Claim, ...]:
    """Read the claims of a YAML file; `called` is the file's name in messages and verdicts.

    Raises ConfigError if the file cannot be read, or if its claims are invalid. Its message names `key`, the key with
    which the user gave the file; empty if the user gave the folder that holds it.
    """
    given = f"{key}={called}" if key else called
    try:
        values, digest = yaml.safe_load(path.read_text(encoding="utf-8")), sha256(path)
    except FileNotFoundError:
        raise ConfigError(f"{given} is not there. Type the path of a YAML file of claims.") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{given} cannot be read: {in_one_line(error)}; allowed: a YAML file of claims.") from None
    queue = str(Path(called).with_name(QUEUE)) if path.with_name(QUEUE).is_file() else ""
    try:
        values = check_fields(values, OF_FILE, OPTIONAL_OF_FILE, "the file")
        if values["seeds"] < FEWEST_SEEDS:
            raise ValueError(f"seeds={values['seeds']} is no whole number of at least {FEWEST_SEEDS}")
        if not values["claims"]:
            raise ValueError("claims is empty, and there is nothing to test")
        conditions = _parse_settings(values.get("conditions", {}), "conditions")
        file = ClaimsFile(
            path=called, sha256=digest, committed=str(values["committed"]), seeds=values["seeds"],
            conditions=conditions, analysis=values.get("analysis", ""), queue=queue,
        )  # fmt: skip
        arms = {str(name): _parse_settings(own, f"arm {name}") for name, own in values.get("arms", {}).items()}
        claims = tuple(_parse_claim(own, file, arms) for own in values["claims"])
        names = [claim.name for claim in claims]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two claims are called {min(twice)}")
    except ValueError as error:
        stop = "" if str(error)[-1] in ".?" else "."
        raise ConfigError(f"{given}: {error}{stop} docs/verdicts.md describes the fields.") from None
    return claims


def _parse_claim(values: Any, file: ClaimsFile, arms: Mapping[str, Settings]) -> Claim:
    """Build one claim from `values`, its entry in the file; `arms` maps names of arms to their settings.

    This function and the functions below raise ValueError for an invalid field.
    """
    where = f"claim {values.get('name') if isinstance(values, dict) else values}"
    fields = check_fields(values, OF_CLAIM, OPTIONAL_OF_CLAIM, where)
    guardrail: Guardrail | None = None
    measures = [fields["measure"]]
    if "guardrail" in fields:
        limit = check_fields(fields["guardrail"], OF_GUARDRAIL, {}, f"{where}, guardrail")
        guardrail = Guardrail(limit["measure"], parse_number(limit["margin"], f"{where}, guardrail: margin"))
        measures.append(guardrail.measure)
    for name in measures:
        if name not in MEASURES:
            raise ValueError(f"{where}: measure {name} is none of {', '.join(MEASURES)}")
    if fields["direction"] not in (-1, 0, 1):
        raise ValueError(f"{where}: direction {fields['direction']} is none of -1, 0, 1")
    is_ratio = MEASURES[fields["measure"]].is_ratio
    smallest = parse_number(fields["smallest"], f"{where}: smallest", 1 if is_ratio else 0)
    swept_keys = [fields[field] for field in ("best_of", "mean_over") if fields.get(field)]
    if len(swept_keys) > 1:
        raise ValueError(f"{where} has both best_of and mean_over")
    for key in (*fields["free"], *swept_keys):
        _check_key(key, where, KEYS_AND_GROUPS)
    if not fields["contrasts"]:
        raise ValueError(f"{where}: contrasts is empty, and there is nothing to compare")
    contrasts = tuple(_parse_contrast(entry, arms, is_ratio, where) for entry in fields["contrasts"])
    arms_of = [(contrast.treated, contrast.control) for contrast in contrasts]
    if twice := [pair for pair in arms_of if arms_of.count(pair) > 1]:  # Holm's correction would count it twice
        raise ValueError(f"{where} compares {twice[0][0]} against {twice[0][1]} twice")
    parsed = {
        "contrasts": contrasts, "free": tuple(fields["free"]), "guardrail": guardrail, "smallest": smallest,
        "added": str(fields.get("added", "")), "file": file,
    }  # fmt: skip
    return Claim(**fields | parsed)


def _parse_contrast(values: Any, arms: Mapping[str, Settings], is_ratio: bool, where: str) -> Contrast:
    """Build one contrast from `values`, its entry in a claim.

    `is_ratio` tells whether the claim's measure is a ratio; `where` names the claim in messages.
    Raises ValueError for an unknown arm, and if the paper lacks a number of `printed`.
    """
    fields = check_fields(values, OF_CONTRAST, OPTIONAL_OF_CONTRAST, f"{where}, a contrast")
    treated, control = fields["treated"], fields["control"]
    for name in (treated, control):
        if name not in arms:
            raise ValueError(f"{where}: {name} is none of the arms.{did_you_mean(name, list(arms))}")
    if treated == control:
        raise ValueError(f"{where}: {treated} is compared with itself; write two arms")
    printed = []
    for row in fields.get("printed", ()):
        row = check_fields(row, OF_PRINTED, {}, f"{where}, printed")
        for columns in row.values():
            check_fields(columns, dict.fromkeys(columns, TEXT), {}, f"{where}, printed")
        numbers = {side: {**row["where"], **row[side]} for side in ("treated", "control")}
        try:
            printed.append(reference.paper_effect(**numbers, is_ratio=is_ratio))
        except KeyError as error:
            raise ValueError(f"{where}, printed: {error.args[0]}") from None
    return Contrast(treated, control, arms[treated], arms[control], tuple(printed))


def _check_key(key: Any, where: str, known: set[str]) -> None:
    """Raise ValueError unless a key of a claims file is in `known`, keys (or groups) that define arms.

    `where` names the place in the file for the message.
    """
    if not isinstance(key, str) or key not in known | FIELDS.keys():
        raise ValueError(f"{where}: {key} is no key of a run.{did_you_mean(str(key), sorted(known))}")
    if key not in known:  # it is not among the settings of any run
        raise ValueError(f"{where}: {key} defines no arm; write keys that do, such as format.name or lora.rank")


def _parse_settings(values: Any, where: str) -> dict[str, str]:
    """Convert settings to text, spelled as run records spell them: 1 becomes `1.0` for a float key.

    Raises ValueError for an unknown key or choice; `where` names the place in the file for the message.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}: {values} is no mapping; write {{KEY: VALUE}}, for example {{format.name: bf16}}")
    found = {}
    for key, value in values.items():
        _check_key(key, where, KEYS)
        if FIELDS[key].metadata["choices"]:
            value = str(value)
        elif TYPES[key] in (float, float | None) and type(value) in (int, str):
            value = parse_number(value, f"{where}: {key}")
        try:
            check_type(key, FIELDS[key], value)
            check_bounds(key, FIELDS[key].metadata, value)
        except ConfigError as error:
            raise ValueError(f"{where}: {error}") from None
        group = key.removesuffix(".name")
        if group in ("format", "task") and str(value) not in (allowed := choices_of(group)):
            raise ValueError(f"{where}: {key} {value} is none of {', '.join(allowed)}")
        found[key] = str(value)
    return found
