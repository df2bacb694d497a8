"""Resolve what `evaluate accuracy` evaluates, a run or a model alone, and load the benchmarks that it is asked.

A run is evaluated as its adapter on its base, as its base alone, or with lora=full as the model that it trained. A
benchmark is a task with held-out questions, given as NAME or NAME:PATH.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import torch

from qerl_lab import preflight, tasks
from qerl_lab.config import rules
from qerl_lab.config.arm import as_recorded, settings_of_arm
from qerl_lab.config.message import first_line, with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, ModelConfig, RunConfig, TaskConfig
from qerl_lab.evaluate.evaluate_options import AccuracyOptions, requested_run, split_name_and_path
from qerl_lab.formats.format import PackedAs
from qerl_lab.model import on_disk, policy
from qerl_lab.model.dense import dense_tensors, write_model
from qerl_lab.model.loading import stored_as
from qerl_lab.model.on_disk import read_model_json
from qerl_lab.model.policy import Policy
from qerl_lab.model.weight_files import local_folder
from qerl_lab.rollout.vllm.base import scratch_folder, size_of
from qerl_lab.tasks import Task
from qerl_lab.tasks.question_files import reword_path_error
from qerl_lab.tasks.questions import wording

# For a model without a run: a fixed day, so that all its evaluations have the same prompts.
DAY_WITHOUT_RUN = date(2026, 1, 1)
LONGEST = 4096  # completion tokens for a model without a run, if its context allows


@dataclass(frozen=True)
class Subject:
    """A run or model to evaluate. `cfg` says how to load the model and how to sample (`eval` and `rollout`)."""

    description: str  # for the user, e.g. `run DIR, its base alone`
    cfg: RunConfig
    adapter: Path | None = None  # folder; None for a base alone, and for a run that trained all weights
    base: ModelConfig | None = None  # with lora=full the model before training; `cfg.model` is the trained one
    run_seed: int = 0  # seed of the run, whatever `seed=` is; for a model alone the sampling seed
    arm: Mapping[str, str] = field(default_factory=dict)  # of a run: settings as text, hash of training questions
    day: date = DAY_WITHOUT_RUN  # on which the run started, for chat templates that print it

    @property
    def is_dense(self) -> bool:
        """Tell whether the base is dense; then `common=true` needs no second engine with a dequantized base."""
        return self.cfg.format.name == DENSE_FORMAT


def resolve_subject(options: AccuracyOptions) -> Subject:
    """Return what to evaluate: the run `options.run` or the model `options.model`.

    Other options that are not None replace settings of the run, or the defaults. Raises ConfigError if the run or
    model is missing or does not fit the options, or if prompt and completion can exceed the context of a model on this
    machine.
    """
    subject = _resolve_run(options) if options.run else _resolve_model(options)
    cfg = subject.cfg
    cfg.device, cfg.gpus, cfg.rollout.engine = options.device, 1, options.rollout or cfg.rollout.engine
    for group, key in (
        (cfg, "seed"), (cfg.eval, "temperature"), (cfg.eval, "top_p"), (cfg.rollout, "batch_size"),
        (cfg.rollout, "max_prompt_tokens"), (cfg.rollout, "max_completion_tokens"),
    ):  # fmt: skip
        if (given := getattr(options, key)) is not None:
            setattr(group, key, given)
    if options.common and cfg.rollout.engine == "vllm_server":
        raise ConfigError(
            "common=true with rollout=vllm_server: the server has the base that it was started with. Type "
            "rollout=transformers or rollout=vllm."
        )
    rules.check_engine(cfg)
    preflight.check_engine_here(cfg)
    if folder := on_disk.local_path(cfg.model.path):
        on_disk.check_context(read_model_json(folder / "config.json"), cfg, f"model.path={cfg.model.path}", group="")
    return subject


def _resolve_run(options: AccuracyOptions) -> Subject:
    """Return what to evaluate for `run=`.

    This is the run's base with its final adapter, or the trained model if the run has lora=full. With `adapter=false`
    it is the base alone. Raises ConfigError if the run is missing, if its model is gone or has changed, or, unless
    `adapter=false`, if the run is not finished.
    """
    directory = requested_run(options)
    cfg = directory.config()
    subject = Subject(f"run {options.run}", cfg, run_seed=cfg.seed, day=directory.first_day())
    on_disk.check_content(cfg)
    directory.refuse_other_model(local_folder(cfg.model.path, cfg.model.revision))
    if not options.adapter:
        return replace(subject, description=f"{subject.description}, its base alone")
    arm = settings_of_arm(as_recorded(cfg))
    arm["training_sha256"] = directory.environment().get("data", {}).get("training_sha256", "")
    if cfg.trains_all:
        base, cfg.model = cfg.model, replace(cfg.model, path=str(directory.model), revision=None, hash=None)
        return replace(subject, base=base, arm=arm)
    return replace(subject, adapter=directory.adapter, arm=arm)


def _resolve_model(options: AccuracyOptions) -> Subject:
    """Return what to evaluate for `model=`.

    A packed model keeps its format. A dense model is packed in `options.format`, or stays in bf16 if `options.format`
    is None. Raises ConfigError if the model is missing or has no chat template, or if it is packed in another format
    than `options.format`.
    """
    cfg, given = RunConfig(), f"model={options.model}"
    folder = local_folder(options.model, options.revision, key="model")
    on_disk.check_chat_model(folder, given)
    cfg.model = replace(cfg.model, name=Path(options.model).name, path=options.model, revision=options.revision)
    cfg.format.name = options.format or DENSE_FORMAT
    if (stored := stored_as(folder)) is not None:
        cfg.format = packed_format(stored)
        if options.format not in (None, cfg.format.name):
            raise ConfigError(
                f"{given} is packed in {cfg.format.name}, and format={options.format} was given. Leave format out, or "
                "type the path of the dense model."
            )
    context = on_disk.context_tokens(read_model_json(folder / "config.json"))
    if context is not None:
        cfg.rollout.max_completion_tokens = options.max_completion_tokens or min(LONGEST, context // 2)
        left = context - cfg.rollout.max_completion_tokens  # by a completion
        cfg.rollout.max_prompt_tokens = left if left > 0 else context // 2
    return Subject(f"{given} in {cfg.format.name}", cfg, run_seed=options.seed or 0)


def packed_format(stored: PackedAs) -> FormatConfig:
    """Return the config group `format` that loads the packed checkpoint `stored`: format, options, dense layers."""
    options = {key: value for key, value in vars(stored.weight_format).items() if value is not None}
    return FormatConfig(name=stored.weight_format.NAME, ignore=list(stored.ignore), **options)


def load_policy(subject: Subject) -> Policy:
    """Load a subject's base and adapter. Raises ConfigError if they cannot be loaded or do not fit each other."""
    cfg = subject.cfg
    if cfg.cpu_threads:
        torch.set_num_threads(cfg.cpu_threads)
    loaded = policy.build(cfg, policy.device_of(cfg.device), fits_names=True)
    loaded.chat.day, loaded.chat.key = subject.day, "instruction"
    loaded.model.requires_grad_(False)  # so that the engine reserves no memory for gradients
    if subject.adapter is not None:
        policy.load_adapter(loaded.model, subject.adapter)
    return loaded


@contextmanager
def dequantized_subject(subject: Subject) -> Iterator[Subject]:
    """Context manager: yield the subject with its packed layers dequantized to bfloat16, in a temporary folder."""
    loaded = policy.build(subject.cfg, policy.device_of(subject.cfg.device), fits_names=True)
    tensors, _ = dense_tensors(loaded, torch.bfloat16)
    model_folder = local_folder(subject.cfg.model.path, subject.cfg.model.revision)
    with scratch_folder(size_of(tensors)) as folder:
        write_model(tensors, None, model_folder, folder)
        del loaded, tensors
        model = replace(subject.cfg.model, path=str(folder), revision=None, hash=None)
        cfg = replace(subject.cfg, model=model, format=replace(subject.cfg.format, name=DENSE_FORMAT))
        yield replace(subject, cfg=cfg)


def load_benchmarks(options: AccuracyOptions, cfg: RunConfig) -> list[Task]:
    """Load the tasks named in `options.benchmarks`; the field `heldout` of each holds the questions to ask.

    If none is named, loads the run's own task (`cfg.task`). Raises ConfigError if a task cannot be read or has no
    questions.
    """
    task_of_run = cfg.task if options.run else None
    named = [task_config(task_of_run, *split_name_and_path(spec)) for spec in options.benchmarks]
    benchmarks = []
    for chosen in named or [cfg.task]:
        if options.instruction is not None:
            chosen = replace(chosen, instruction=options.instruction)
        task = load_questions(chosen, f"benchmarks={chosen.name}:")
        if not task.heldout:
            raise ConfigError(f"{task.name} has no question to ask. Type benchmarks=NAME:PATH of a set that has.")
        benchmarks.append(replace(task, heldout=task.heldout[: options.questions or None]))
    return benchmarks


def note_trained_questions(chosen: Subject, benchmarks: list[Task]) -> list[Task]:
    """Warn of benchmarks that ask questions which the run was trained on; return them with the warnings added.

    Questions are compared by `wording`. If the training questions cannot be read, or are no longer those of the run's
    record, each benchmark gets a warning that says so. Nothing is compared for a model or a base alone.
    """
    if not chosen.arm:
        return benchmarks
    problem, trained = "", set[str]()
    try:
        task = tasks.load(chosen.cfg.task)
        trained = {wording(question.prompt) for question in task.train}
        if chosen.arm["training_sha256"] not in ("", task.data["training_sha256"]):  # older records have ""
            problem = "they have changed since"
    except ConfigError as error:
        problem = first_line(error)
    noted = []
    for benchmark in benchmarks:
        count = sum(wording(question.prompt) in trained for question in benchmark.heldout)
        if problem:
            note = f"not compared with the training questions of the run: {problem}"
        elif count:
            note = f"the run was trained on {count:,} of these {with_noun(len(benchmark.heldout), 'question')}"
        else:
            note = ""
        noted.append(replace(benchmark, warnings=(*benchmark.warnings, note)) if note else benchmark)
    return noted


def load_questions(cfg: TaskConfig, prefix: str) -> Task:
    """Load a task for evaluation. Raises ConfigError if the questions cannot be read.

    `prefix` is what users type before a path of questions, such as "benchmarks=gsm8k:"; the message repeats it.
    """
    try:
        return tasks.load(cfg, training=None)
    except ConfigError as error:
        raise error if cfg.module else reword_path_error(error, prefix) from error


def task_config(run_task: TaskConfig | None, name: str, path: str | None) -> TaskConfig:
    """Return the configuration of the benchmark `name`, with its questions in `path`.

    This is `run_task` if it has the name, and sets no task.module, which would replace parts of the benchmark. Else it
    is conf/task/NAME.yaml, with the instruction of `run_task` if the YAML has none. With `path` None the questions come
    from the path of `run_task`, or for a YAML from the task's own source.
    """
    if run_task is not None and name == run_task.name and not run_task.module:
        return replace(run_task, path=path or run_task.path)
    cfg = replace(tasks.read_task_config(name), path=path)
    if run_task is not None and cfg.instruction == TaskConfig().instruction:  # the YAML has none
        cfg.instruction = run_task.instruction
    return cfg
