"""Search values of numeric keys by short sweeps: `python -m qerl_lab.tools.search out=DIR KEY=LOW..HIGH ...`."""

from qerl_lab import exits

with exits.starting(__name__):
    import importlib.util
    from functools import partial

    from qerl_lab.cli.grammar import Command
    from qerl_lab.config.option import ConfigError
    from qerl_lab.tools.search_space import SearchOptions, check, is_own, space


def search(options: SearchOptions, words: list[str]) -> None:
    """Check options and ranges, then run the trials. `words` are for the main command. Raises as `study.run`."""
    check(options)
    found = space(words, options)
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError(
            "a search needs the package optuna, which is not installed. Type pip install 'qerl-lab[search]'."
        )
    from qerl_lab.cli import train
    from qerl_lab.tools import search_study as study

    study.run(options, found, train.main)


LINE = "python -m qerl_lab.tools.search"
OVER = "optim.learning_rate=1e-4..1e-2"
EXAMPLES = (
    (f"{LINE} out=searches/pocket +experiment=nvfp4_aqn aqn.sigma_start=0.01..0.3 {OVER}", "sigma and learning rate"),
    (f"{LINE} out=searches/nf4 +experiment=nf4 scale=smollm2 jobs=2 {OVER} trials=30", "of another arm and scale"),
)


def command(words: list[str]) -> Command[SearchOptions]:
    """Return the command; `words` are passed on to the main command."""
    about = "Search values of numeric keys: an Optuna study whose trials are short sweeps of the main command"
    usage = f"{LINE} WORDS OF THE MAIN COMMAND ... KEY=LOW..HIGH ..."
    return Command(
        usage, about, SearchOptions, partial(search, words=words), examples=EXAMPLES, required=("out",), alone=True
    )


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    own = [word for word in words if is_own(word)]
    if words and not own:
        own = ["out="]  # then the error names `out` as missing; the manual is only for an empty command
    return command([word for word in words if not is_own(word)]).run(own)


if __name__ == "__main__":
    exits.run(main)
