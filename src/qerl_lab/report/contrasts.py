"""Find the arms that a contrast compares: equal in every setting that the claim does not free. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qerl_lab.report.arms import Arm, Run
from qerl_lab.report.claims import Claim, Contrast, Settings
from qerl_lab.report.runs import Record


@dataclass(frozen=True)
class Side:
    """One side of a contrast: its records by value of the key that the claim spans (one entry if it spans none)."""

    options: Mapping[str, Sequence[Record]]
    finished: int
    started: int

    @property
    def records(self) -> list[Record]:
        return [record for records in self.options.values() for record in records]

    @property
    def seeds(self) -> set[int]:
        """Return the seeds that every option has."""
        return set.intersection(*({record.run.seed for record in records} for records in self.options.values()))


@dataclass(frozen=True)
class Pair:
    """Two sides that differ only in what may differ; `context` holds the settings that they share."""

    treated: Side
    control: Side
    context: Arm


@dataclass(frozen=True)
class Missing:
    """The reason why there is no pair."""

    why: str


def find(claim: Claim, contrast: Contrast, counted: Sequence[Record], found: Sequence[Run]) -> list[Pair] | Missing:
    """Return every pair of arms that tests a contrast, or the reason why there is none.

    `found` also has the runs that do not count. Runs outside the conditions of the claim's file are ignored.
    """
    counted = [record for record in counted if _has(record.run, claim.file.conditions)]
    found = [run for run in found if _has(run, claim.file.conditions)]
    treated, control = (
        _sides(claim, settings, counted, found) for settings in (contrast.treated_settings, contrast.control_settings)
    )
    pairs = [
        Pair(one, other, context)
        for (context, _), one in treated.items() for (same, _), other in control.items() if context == same
    ]  # fmt: skip
    if pairs:
        return pairs
    settings = {contrast.treated: contrast.treated_settings, contrast.control: contrast.control_settings}
    lacking = [name for name, sides in ((contrast.treated, treated), (contrast.control, control)) if not sides]
    if lacking:
        names = (f"{name} ({_started(settings[name], found)} started)" for name in lacking)
        return Missing(f"no finished run of {' and of '.join(names)}")
    return Missing(f"no two arms are equal but for what is compared: {_least_difference(treated, control)}")


def _started(settings: Settings, found: Sequence[Run]) -> int:
    return sum(_has(run, settings) for run in found)


def _has(run: Run, settings: Settings) -> bool:
    return all(run.value(key) == value for key, value in settings.items())


def _sides(
    claim: Claim, settings: Settings, counted: Sequence[Record], found: Sequence[Run]
) -> dict[tuple[Arm, Arm], Side]:
    """Group the runs with these settings by (shared settings, free settings) into sides."""
    options: dict[tuple[Arm, Arm], dict[str, list[Record]]] = {}
    started: dict[tuple[Arm, Arm], int] = {}
    for run in (run for run in found if _has(run, settings)):
        started[_split(run, claim)] = started.get(_split(run, claim), 0) + 1
    for record in (record for record in counted if _has(record.run, settings)):
        at = record.run.value(claim.across) if claim.across else ""
        options.setdefault(_split(record.run, claim), {}).setdefault(at, []).append(record)
    return {
        key: Side(values, sum(map(len, values.values())), started[key]) for key, values in options.items()
    }  # fmt: skip


def _split(run: Run, claim: Claim) -> tuple[Arm, Arm]:
    """Split a run's settings into shared and free ones, without the key that the claim spans."""
    shared = tuple(item for item in run.arm if not is_free(item[0], claim) and item[0] != claim.across)
    return shared, tuple(item for item in run.arm if is_free(item[0], claim))


def is_free(key: str, claim: Claim) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in claim.free)


def _least_difference(treated: Mapping[tuple[Arm, Arm], Side], control: Mapping[tuple[Arm, Arm], Side]) -> str:
    """Say in which keys the two nearest candidates differ although they should not."""
    differ = [sorted({key for key, _ in {*one} ^ {*other}}) for one, _ in treated for other, _ in control]
    return "the nearest two differ in " + ", ".join(sorted(differ, key=len)[0])
