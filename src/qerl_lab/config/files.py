"""The folders of YAML: conf/, whose options compose a run, and sweeps/."""

from pathlib import Path


def package_data(name: str) -> Path:
    """The folder `conf`, `sweeps` or `results/reference`: in an installed package, else in the checkout."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.is_dir() else Path(__file__).parents[3] / name


def group_folder(group: str) -> Path:
    """The folder of a group's options: conf/<group>/, or sweeps/."""
    return package_data("sweeps") if group == "sweeps" else package_data("conf") / group


def choices_of(group: str) -> list[str]:
    """Names of a group's options: the files of its folder."""
    return sorted(path.stem for path in group_folder(group).glob("*.yaml"))
