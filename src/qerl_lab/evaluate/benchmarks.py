"""Load benchmarks: tasks with held-out questions, given as NAME or NAME:PATH."""

from dataclasses import replace

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig, TaskConfig
from qerl_lab.evaluate.evaluate_options import AccuracyOptions, split_name_and_path
from qerl_lab.tasks import Task
from qerl_lab.tasks.question_files import reword_path_error


def load_benchmarks(options: AccuracyOptions, cfg: RunConfig) -> list[Task]:
    """Load the tasks in `options.benchmarks`, or if none is named the run's own; `heldout` has the questions to ask."""
    found, own = [], cfg.task if options.run else None
    for chosen in [task_config(own, *split_name_and_path(spec)) for spec in options.benchmarks] or [cfg.task]:
        if options.instruction is not None:
            chosen = replace(chosen, instruction=options.instruction)
        task = load_questions(chosen, f"benchmarks={chosen.name}:")
        if not task.heldout:
            raise ConfigError(f"{task.name} has no question to ask. Type benchmarks=NAME:PATH of a set that has.")
        found.append(replace(task, heldout=task.heldout[: options.questions or None]))
    return found


def load_questions(cfg: TaskConfig, before: str) -> Task:
    """Load a task for evaluation. Errors name the option as it was typed, `before`, such as "benchmarks=gsm8k:"."""
    try:
        return tasks.load(cfg, training=None)
    except ConfigError as error:
        raise error if cfg.module else reword_path_error(error, before) from error


def task_config(run_task: TaskConfig | None, name: str, path: str | None) -> TaskConfig:
    """Return the configuration of the benchmark `name`, with its questions in `path`.

    It is `run_task` if that has this name and is no task.module, with its own path if `path` is None. Else it is
    conf/task/NAME.yaml, with the instruction of `run_task` if it has none.
    """
    if run_task is not None and name == run_task.name and not run_task.module:
        return replace(run_task, path=path or run_task.path)
    cfg = replace(tasks.read_task_config(name), path=path)
    if run_task is not None and cfg.instruction == TaskConfig().instruction:  # the YAML has none
        cfg.instruction = run_task.instruction
    return cfg
