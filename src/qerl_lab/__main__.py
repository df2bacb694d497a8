"""`python -m qerl_lab`, and the console script `qerl-lab`: see `qerl_lab.cli.train`."""

from qerl_lab.system import exits


def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    from qerl_lab.cli import train  # takes a second, in which Ctrl-C is heard already

    return train.main(words)


def command() -> None:
    """Run the command with the arguments of this process, and exit with its exit code."""
    exits.run(main)


if __name__ == "__main__":
    command()
