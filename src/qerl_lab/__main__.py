"""`python -m qerl_lab`, and the console script `qerl-lab`: see `qerl_lab.cli.train`."""

from qerl_lab.system import exits


def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    from qerl_lab.cli import train  # takes a second, in which Ctrl-C is heard already

    return train.main(words)


def command() -> None:
    """The process of the command."""
    exits.run(main)


if __name__ == "__main__":
    command()
