"""Benchmarks: tasks whose held-out questions are asked, by their names and paths."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omegaconf import OmegaConf

from qerl_lab import tasks
from qerl_lab.config.files import group_folder
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig, TaskConfig
from qerl_lab.evaluate.options import AccuracyOptions, split
from qerl_lab.model.policy import Policy
from qerl_lab.tasks import Question, Task
from qerl_lab.tasks.data import is_local, respelled


@dataclass(frozen=True)
class Benchmark:
    """A task and the first questions of it."""

    task: Task
    questions: Sequence[Question]

    @property
    def name(self) -> str:
        return self.task.name

    def fitting(self, policy: Policy, limit: int) -> list[Question]:
        """The questions whose prompt, as a chat, has at most `limit` tokens. Raises ConfigError where none has."""
        lengths = [len(policy.prompt_ids(self.task.messages(question))) for question in self.questions]
        found = [question for question, length in zip(self.questions, lengths, strict=True) if length <= limit]
        if not found:
            raise ConfigError(
                f"max_prompt_tokens={limit} leaves out all {len(lengths):,} questions of {self.name}; the shortest has "
                f"{min(lengths)} tokens. Type max_prompt_tokens={max(lengths)}."
            )
        return found


def load(options: AccuracyOptions, cfg: RunConfig) -> list[Benchmark]:
    """Read the questions of every benchmark. Raises ConfigError where they cannot be, or a benchmark has none."""
    found, own = [], cfg.task if options.run else None
    asked = [(spec, task_config(own, *split(spec))) for spec in options.benchmarks] or [("the run's task", cfg.task)]
    for spec, chosen in asked:
        if chosen.path is not None and (options.benchmarks or not chosen.module):
            is_local(chosen.path, f"benchmarks={chosen.name}:")  # of a run too, whose files may lie elsewhere by now
        if options.instruction is not None:
            chosen = replace(chosen, instruction=options.instruction)
        task = questions_of(chosen, f"benchmarks={chosen.name}:")
        questions = task.heldout[: options.questions or None]
        if not questions:
            raise ConfigError(f"{spec} has no question to ask. Type benchmarks=NAME:PATH of a set that has.")
        found.append(Benchmark(task, questions))
    return found


def questions_of(cfg: TaskConfig, before: str) -> Task:
    """The task with its questions. Raises ConfigError in the words of this command, with the path behind `before`."""
    try:
        return tasks.benchmark(cfg)
    except ConfigError as error:
        raise error if cfg.module else respelled(error, before) from error


def task_config(own: TaskConfig | None, name: str, path: str | None) -> TaskConfig:
    """A run's own task as the run has it; another one as its YAML has it, or with the run's instruction."""
    if own is not None and name == own.name and not own.module:
        return replace(own, path=path or own.path)
    default = TaskConfig() if own is None else TaskConfig(instruction=own.instruction)
    written = OmegaConf.load(group_folder("task") / f"{name}.yaml")
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(default), written))
    assert isinstance(cfg, TaskConfig)
    return replace(cfg, name=name, path=path)


def about(benchmark: Benchmark) -> dict[str, object]:
    """What a record keeps of it."""
    return {"instruction": benchmark.task.instruction, **benchmark.task.data}
