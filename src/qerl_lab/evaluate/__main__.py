"""Measurements of a policy as commands: `python -m qerl_lab.evaluate sigma [model=...] [sigmas=...]`."""

from dataclasses import dataclass

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab import terminal
    from qerl_lab.cli.grammar import Command, choose
    from qerl_lab.config.option import ConfigError, option


@dataclass
class SigmaOptions:
    model: str = option("pocket", "whose sampler: Hugging Face id, local directory, FILE.gguf, or `pocket`")
    sigmas: list[float] = option([0.02, 0.05, 0.1, 0.15, 0.2, 0.3], "standard deviations of the noise", above=0)


def sigma(options: SigmaOptions) -> None:
    """Print the KL of each format and of each sigma. Raises ConfigError for a model that cannot be measured."""
    if not options.sigmas:
        raise ConfigError("sigmas=[] is empty; allowed: numbers above 0. Type for example sigmas=[0.05,0.1].")
    terminal.quiet_third_parties()  # some speak while they are imported
    from qerl_lab.evaluate.sigma import measure

    measure(options.model, options.sigmas)


COMMANDS = {
    "sigma": Command(
        "python -m qerl_lab.evaluate sigma",
        "KL(quantized || BF16) of each format beside KL(noisy || clean) of each sigma, in nats per completion token.",
        SigmaOptions,
        sigma,
        examples=(
            ("python -m qerl_lab.evaluate sigma model=pocket", "the embedded policy"),
            (
                "python -m qerl_lab.evaluate sigma model=DIR sigmas=[0.005,0.01]",
                "which sigma is as much noise as a format, on a model of yours",
            ),
        ),
        alone=True,
    )
}


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    return choose(COMMANDS, words)


if __name__ == "__main__":
    exits.run(main)
