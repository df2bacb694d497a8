"""Options of `python -m qerl_lab.evaluate accuracy|compare|entropy|sigma` and rules between them. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.option import ConfigError, did_you_mean, option
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.schema import DEVICES, ENGINES, MAX_TEMPERATURE, POCKET, EvalConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.config.task import ARITHMETIC
from qerl_lab.model import on_disk
from qerl_lab.record.directory import RunDirectory

PAPER = EvalConfig()  # its defaults are the settings of the QeRL paper
SMALL = ("aime24", "aime25", "amc23")  # 30 or 40 questions: one sample each is too noisy
SMALL_SAMPLES = 16
BY_TASK, BY_FIRST_CHARACTER = "task", "first_character"  # ways of grading


@dataclass
class AccuracyOptions:
    run: str = option("", "directory of a finished run, evaluated with its final adapter; the key may be left out")
    model: str = option("", "or a model alone: Hugging Face id, local directory, FILE.gguf, or `pocket`")
    revision: str | None = option(None, "model=: branch, tag or commit on the hub; null is the newest")
    format: str | None = option(
        None,
        "model=: weight format; null is the stored one, bf16 for a dense model",
        choices=tuple(choices_of("format")),
    )
    adapter: bool = option(True, "run=: use the adapter; false evaluates only the base")
    benchmarks: list[str] = option([], "tasks, NAME or NAME:PATH (as task.path); none means the run's own task")
    questions: int = option(0, "questions of each, from the first; 0: all", at_least=0)
    samples: int | None = option(
        None, f"completions per question; null is the run's, with model= {PAPER.samples}; AIME, AMC: {SMALL_SAMPLES}; "
        "greedy: 1",
        at_least=1, at_most=4096,
    )  # fmt: skip
    temperature: float | None = option(
        None, f"0 is greedy; null is the run's eval.temperature, with model= {PAPER.temperature:g} (paper, Sec. 4.1)",
        at_least=0, at_most=MAX_TEMPERATURE,
    )  # fmt: skip
    top_p: float | None = option(
        None,
        f"nucleus sampling; null is the run's eval.top_p, with model= {PAPER.top_p:g} (paper, Sec. 4.1)",
        above=0,
        at_most=1,
    )
    seed: int | None = option(
        None, "seeds the sampling; null is the run's, with model= 0", at_least=0, at_most=2**32 - 1
    )
    grading: str = option(
        BY_TASK, "task: as in training; first_character: as QeRL's released eval/gsm8k.py, which counts 16 for 18",
        choices=(BY_TASK, BY_FIRST_CHARACTER),
    )  # fmt: skip
    instruction: str | None = option(
        None,
        "system message; null is the run's, but another task may have one of its own (arithmetic, code_io); with "
        "model= the task's own, or the paper's",
    )
    max_prompt_tokens: int | None = option(
        None,
        "longer questions are left out; null is the run's, with model= what a completion leaves of the context",
        at_least=1,
    )
    max_completion_tokens: int | None = option(
        None,
        "longest completion in tokens; null is the run's, with model= 4096, at most half of the context",
        at_least=1,
    )
    common: bool = option(
        False,
        "evaluate a second time, on an engine that all arms share: the base dequantized to BF16, with the adapter",
    )
    rollout: str | None = option(
        None, "engine that samples; null is the run's, with model= transformers", choices=ENGINES
    )
    device: str = option("auto", "auto takes a GPU if there is one", choices=DEVICES)
    batch_size: int | None = option(
        None, "most completions generated at once; null is the run's, with model= 512", at_least=1
    )
    out: str | None = option(None, "directory to write; null is a new one below the run, or below evaluations/")
    overwrite: bool = option(False, "replace the results of other settings in `out`")


def check_accuracy(options: AccuracyOptions) -> None:
    """Raise ConfigError at the first invalid combination of options, or if the run or model does not exist."""
    check_combination(options)
    if options.run:
        requested_run(options)
    else:
        check_model(options.model)


def check_combination(options: AccuracyOptions) -> None:
    """Raise ConfigError at the first invalid combination of options. Looks for no run, model or benchmark."""
    run, model = options.run, options.model
    if bool(run) == bool(model):
        given = f"run={run} and model={model} are given" if run else "neither run= nor model= is given"
        raise ConfigError(f"{given}; allowed: one of them. Type for example run=RUN_DIR, or model=pocket.")
    if model and not options.benchmarks:
        raise ConfigError(f"benchmarks= is missing, and model={model} has no task. Type for example benchmarks=gsm8k.")
    for key in ("format", "revision"):
        if run and (value := getattr(options, key)) is not None:
            raise ConfigError(f"{key}={value} is of a model, and run={run} has its own. Leave {key} out.")
    if model and not options.adapter:
        raise ConfigError(f"adapter=false is of a run, and model={model} has no adapter. Leave adapter out.")
    names = [split_name_and_path(spec)[0] for spec in options.benchmarks]
    for name, spec in zip(names, options.benchmarks, strict=True):
        check_task(spec, f"{spec} in benchmarks=[{','.join(options.benchmarks)}]", "benchmarks=gsm8k")
        if names.count(name) > 1:
            raise ConfigError(f"{name} is in benchmarks {names.count(name)} times. Type it once in each command.")


def requested_run(options: AccuracyOptions) -> RunDirectory:
    """Return the directory of the run in `options.run`.

    Raises ConfigError if the directory holds no run, or if its adapter is wanted and the run is not finished with one.
    """
    directory = RunDirectory(Path(options.run).expanduser())
    if not directory.is_claimed:
        raise ConfigError(f"run={options.run} is no directory of a run. Type one that holds resolved.yaml.")
    trained = (directory.adapter / WEIGHTS, directory.model / "config.json")  # the latter with lora=full
    if options.adapter and (directory.status != "done" or not any(file.is_file() for file in trained)):
        move = "move DONE out of the directory and " if directory.status == "done" else ""
        raise ConfigError(
            f"run={options.run} has no final adapter ({directory.status_in_words}); allowed: finished runs. First "
            f"{move}type python -m qerl_lab {resume_override(options.run)}, or type adapter=false for its base alone."
        )
    return directory


def check_model(model: str) -> None:
    """Raise ConfigError if `model` is a local path without a model. A hub id is checked when it is loaded."""
    if folder := on_disk.local_path(model, "model"):
        on_disk.check_files(folder, f"model={model}")


def check_task(spec: str, given: str, example: str) -> None:
    """Raise ConfigError unless `spec` is the NAME of a task, or NAME:PATH of a task that reads questions from files.

    The message quotes `given`, as typed, and proposes `example`.
    """
    (name, path), allowed = split_name_and_path(spec), choices_of("task")
    if name not in allowed:
        hint = did_you_mean(name, allowed)
        raise ConfigError(
            f"{given} is no task; allowed: {', '.join(allowed)}, each alone or as NAME:PATH.{hint} "
            f"Type for example {example}."
        )
    if path is not None and (not path.strip() or name == ARITHMETIC):
        reason = f"{name} makes its own questions" if name == ARITHMETIC else "it names no path after the colon"
        raise ConfigError(f"{given} is not allowed, because {reason}. Type {name} alone, or for example gsm8k:DIR.")


def split_name_and_path(spec: str) -> tuple[str, str | None]:
    """Split `NAME:PATH` or `NAME` into name and path; the path of `NAME` is None."""
    name, sign, path = spec.partition(":")
    return name, path if sign else None


@dataclass
class CompareOptions:
    directories: list[str] = option(
        [], "A and B: each the directory of an evaluation, of its run, or of several seeds; the key may be left out"
    )


@dataclass
class EntropyOptions:
    model: str = option(POCKET, "dense model: Hugging Face id, local directory, FILE.gguf, or `pocket`")
    revision: str | None = option(None, "branch, tag or commit on the hub; null is the newest")
    formats: list[str] = option(["all"], "weight formats to measure", choices=("all", *choices_of("format")))
    checkpoints: list[str] = option([], "packed directories to measure too, of any origin: GPTQ, AWQ")
    prompts: str = option("arithmetic", "task whose held-out questions are the prompts, NAME or NAME:PATH")
    questions: int = option(64, "questions of that task, from the first", at_least=2)
    max_completion_tokens: int = option(128, "longest completion in tokens that the dense model samples", at_least=1)
    seed: int = option(0, "seeds the sampling", at_least=0, at_most=2**32 - 1)
    device: str = option("auto", "auto takes a GPU if there is one", choices=DEVICES)
    batch_size: int = option(32, "texts in one forward pass", at_least=1)
    out: str | None = option(None, "directory to write; null is one below evaluations/ for these options")
    overwrite: bool = option(False, "replace the results in `out`")


@dataclass
class SigmaOptions:
    model: str = option(POCKET, "dense model that samples: Hugging Face id, local directory, FILE.gguf, or `pocket`")
    sigmas: list[float] = option([0.02, 0.05, 0.1, 0.15, 0.2, 0.3], "standard deviations of the noise", above=0)
    relative: bool = option(False, "sigma is in units of each norm's own root mean square, as with aqn.relative")
