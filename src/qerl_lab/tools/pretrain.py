"""Make the pocket policy from random weights: `python -m qerl_lab.tools.pretrain out=DIR [seed=0] [updates=650]`."""

from dataclasses import dataclass
from pathlib import Path

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab import terminal
    from qerl_lab.cli.grammar import Command
    from qerl_lab.config.option import ConfigError, option
    from qerl_lab.disk import make_directory
    from qerl_lab.tools.pocket_recipe import Recipe


@dataclass
class PretrainOptions:
    out: str = option("", "directory to write, empty or missing; required")
    seed: int = option(Recipe.seed, "seeds the weights and the problems", at_least=0, at_most=2**32 - 1)
    updates: int = option(Recipe.updates, "optimizer updates", at_least=1)


def make(options: PretrainOptions) -> None:
    """Write the policy. Raises ConfigError unless OUT is writable, and empty or missing."""
    out = Path(options.out).expanduser()
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={options.out} is not empty. Type another directory.")
    make_directory(out, f"out={options.out}")
    terminal.quiet_third_parties()
    from qerl_lab import tasks
    from qerl_lab.tools import pocket_teacher as teacher

    recipe = Recipe(seed=options.seed, updates=options.updates)
    teacher.save(out, recipe, *teacher.pretrain(recipe, tasks.configured("arithmetic")))
    print(f"wrote {out}")


COMMAND = Command(
    "python -m qerl_lab.tools.pretrain",
    "Make the embedded pocket policy.",
    PretrainOptions,
    make,
    examples=(("python -m qerl_lab.tools.pretrain out=pocket", "the policy of the package, in minutes"),),
    required=("out",),
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
