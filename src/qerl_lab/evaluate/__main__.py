"""Commands that measure a policy: `python -m qerl_lab.evaluate accuracy|compare|entropy|sigma KEY=VALUE ...`."""

from collections.abc import Callable
from typing import Any

from qerl_lab.cli.grammar import Command, main_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT
from qerl_lab.evaluate.evaluate_options import (
    AccuracyOptions,
    CompareOptions,
    EntropyOptions,
    SigmaOptions,
    check_accuracy,
    check_model,
    check_task,
)
from qerl_lab.system import exits, terminal


def _run_as_typed(run: Callable[[Any], None], options: AccuracyOptions | EntropyOptions | SigmaOptions) -> None:
    """Call `run(options)`, and let its errors name the key that the user typed: `model`, not model.path."""
    try:
        run(options)
    except ConfigError as error:
        if not options.model:  # with run= the path is the run's
            raise
        raise ConfigError(str(error).replace(f"model.path={options.model}", f"model={options.model}")) from error


def accuracy(options: AccuracyOptions) -> None:
    """Evaluate a run or model on benchmarks, and print the table of results.

    Raises ConfigError for invalid options, and the errors of `accuracy_run.run`.
    """
    check_accuracy(options)
    try:
        with terminal.quiet_imports():
            from qerl_lab.evaluate.accuracy_run import run

        _run_as_typed(run, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on where it stopped") from None


def compare(options: CompareOptions) -> None:
    """Print the differences B - A of the evaluations in two directories, A and B.

    Raises ConfigError unless exactly two directories are given and their evaluations can be paired.
    """
    if len(options.directories) != 2:
        raise ConfigError(
            f"given: {', '.join(options.directories) or 'no directory'}; allowed: two directories, A and B. "
            "Type python -m qerl_lab.evaluate compare A B."
        )
    from qerl_lab.evaluate.compare import run

    run(*options.directories)


def entropy(options: EntropyOptions) -> None:
    """Print and write how quantization changes the entropy of a model. Raises ConfigError for invalid options."""
    if {*options.formats} <= {DENSE_FORMAT} and not options.checkpoints:
        raise ConfigError(
            f"formats=[{','.join(options.formats)}] leaves nothing to compare with the dense model; allowed: a packed "
            "format, or checkpoints=[DIR]. Type for example formats=[nvfp4]."
        )
    check_model(options.model)
    check_task(options.prompts, f"prompts={options.prompts}", "prompts=gsm8k:DIR")
    with terminal.quiet_imports():
        from qerl_lab.evaluate.entropy import run

    _run_as_typed(run, options)


def sigma(options: SigmaOptions) -> None:
    """Print KL(quantized || BF16) of each weight format and KL(noisy || BF16) of each sigma, to compare them.

    Raises ConfigError for a model that cannot be measured.
    """
    check_model(options.model)
    with terminal.quiet_imports():
        from qerl_lab.evaluate.sigma import run

    _run_as_typed(run, options)


LINE = "python -m qerl_lab.evaluate"
COMMANDS: dict[str, Command[Any]] = {
    "accuracy": Command(
        f"{LINE} accuracy RUN_DIR",
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
            (f"{LINE} entropy model=DIR prompts=gsm8k:DIR checkpoints=[AWQ_DIR,GPTQ_DIR]", "with calibrated ones"),
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
            (f"{LINE} sigma model=DIR sigmas=[0.005,0.01]", "which sigma is as much noise as a format, on your model"),
        ),
        alone=True,
    ),
}
main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
