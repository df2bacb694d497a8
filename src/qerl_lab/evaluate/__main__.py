"""Commands that measure a policy: `python -m qerl_lab.evaluate accuracy|compare|entropy|sigma KEY=VALUE ...`."""

from dataclasses import dataclass
from typing import Any

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab import terminal
    from qerl_lab.cli.grammar import Command, main_of
    from qerl_lab.config.option import ConfigError, option
    from qerl_lab.config.schema import POCKET
    from qerl_lab.evaluate.options import (
        AccuracyOptions,
        CompareOptions,
        EntropyOptions,
        check_accuracy,
        check_compare,
        check_entropy,
        check_model,
    )


@dataclass
class SigmaOptions:
    model: str = option(POCKET, "whose sampler: Hugging Face id, local directory, FILE.gguf, or `pocket`")
    sigmas: list[float] = option([0.02, 0.05, 0.1, 0.15, 0.2, 0.3], "standard deviations of the noise", above=0)
    kls: list[float] = option([], "KLs in nats per token, for each of which the sigma is found", above=0)
    relative: bool = option(False, "sigma is in units of each norm's own root mean square, as with aqn.relative")


def sigma(options: SigmaOptions) -> None:
    """Print the KL of each format and each sigma. Raises ConfigError for a model that cannot be measured."""
    if not options.sigmas and not options.kls:
        raise ConfigError("sigmas=[] is empty; allowed: numbers above 0. Type for example sigmas=[0.05,0.1].")
    check_model(options.model)
    with terminal.quiet_imports():
        from qerl_lab.evaluate.sigma import measure

    measure(options.model, options.sigmas, options.kls, options.relative)


def accuracy(options: AccuracyOptions) -> None:
    """Evaluate on the benchmarks and print the table. Raises ConfigError for invalid options, and what `run` raises."""
    check_accuracy(options)
    try:
        with terminal.quiet_imports():
            from qerl_lab.evaluate.examination import run

        run(options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from None


def compare(options: CompareOptions) -> None:
    """Print the paired differences of two evaluations. Raises ConfigError if they cannot be paired."""
    check_compare(options)
    from qerl_lab.evaluate.compare import run

    run(options)


def entropy(options: EntropyOptions) -> None:
    """Print entropy, KL and weight error of every format. Raises ConfigError for invalid options."""
    check_entropy(options)
    with terminal.quiet_imports():
        from qerl_lab.evaluate.entropy import run

    run(options)


LINE = "python -m qerl_lab.evaluate"
COMMANDS: dict[str, Command[Any]] = {
    "accuracy": Command(
        f"{LINE} accuracy",
        "Accuracy of a run or a model on benchmarks: avg@k and pass@k with intervals, length, truncation.",
        AccuracyOptions,
        accuracy,
        examples=(
            (f"{LINE} accuracy RUN_DIR", "the run's own held-out questions, with its adapter"),
            (f"{LINE} accuracy RUN_DIR benchmarks=gsm8k,math500 samples=8 common=true", "also dequantized"),
            (f"{LINE} accuracy model=DIR benchmarks=gsm8k:DIR,aime24:FILE.jsonl", "local copies of the questions"),
        ),
        bare="run",
        alone=True,
    ),
    "compare": Command(
        f"{LINE} compare A B",
        "Differences of B to A, paired by question, with interval and p-value; over several seeds of each too.",
        CompareOptions,
        compare,
        examples=((f"{LINE} compare RUN_DIR OTHER_RUN_DIR", "two runs that were evaluated alike"),),
        required=("directories",),
        bare="directories",
    ),
    "entropy": Command(
        f"{LINE} entropy",
        "Does quantization raise entropy? Entropy, KL and weight error of every format on the same tokens.",
        EntropyOptions,
        entropy,
        examples=(
            (f"{LINE} entropy model=pocket", "every format, rounded to nearest; a minute on a CPU"),
            (f"{LINE} entropy model=DIR formats=all methods=rtn,gptq,awq prompts=gsm8k:DIR", "with calibrated ones"),
        ),
        alone=True,
    ),
    "sigma": Command(
        f"{LINE} sigma",
        "KL(quantized || BF16) of each format beside KL(noisy || clean) of each sigma, in nats per completion token.",
        SigmaOptions,
        sigma,
        examples=(
            (f"{LINE} sigma model=pocket", "the embedded policy"),
            (
                f"{LINE} sigma model=DIR sigmas=[0.005,0.01]",
                "which sigma is as much noise as a format, on a model of yours",
            ),
            (f"{LINE} sigma sigmas=[] kls=[0.003]", "the sigma whose KL is 0.003 nats"),
        ),
        alone=True,
    ),
}


main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
