"""Locate the YAML files: conf/ (options that compose a run) and sweeps/."""

from pathlib import Path


def package_data(name: str) -> Path:
    """Return the path of `conf`, `sweeps` or `results/reference`, in the installed package or else the checkout."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.is_dir() else Path(__file__).parents[3] / name


def group_folder(group: str) -> Path:
    """Return the folder with the options of a configuration group: conf/<group>/, or sweeps/."""
    return package_data("sweeps") if group == "sweeps" else package_data("conf") / group


def choices_of(group: str) -> list[str]:
    """List the options of a configuration group: the names of the YAML files in its folder."""
    return sorted(path.stem for path in group_folder(group).glob("*.yaml"))
