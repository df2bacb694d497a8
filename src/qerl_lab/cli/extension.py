"""A finished run gets more steps: `resume=RUN_DIR steps=N`."""

from dataclasses import replace

from qerl_lab import preflight
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import validate
from qerl_lab.config.spelling import resume_word, shell_word
from qerl_lab.record.directory import RunDirectory


def extend(run: RunDirectory, steps: int) -> None:
    """Note in the record that the run goes on to `steps`; the run itself says what that means for its schedules.

    Raises ConfigError unless the run is finished, of fewer steps, and has the checkpoint of its last one.
    """
    was = run.config()
    if run.status != "done":
        raise ConfigError(
            f"resume={run.path} steps={steps}: the run is {run.status_in_words}, and only a finished one is extended. "
            f"Type {resume_word(run.path)} alone first."
        )
    if steps <= was.steps:
        raise ConfigError(f"steps={steps}: the run has {was.steps} already. Type for example steps={2 * was.steps}.")
    if run.last_saved() != was.steps:
        raise ConfigError(
            f"{run.checkpoints} holds no checkpoint of step {was.steps}, from which the run would go on. "
            f"Type {shell_word('lora.start_from', run.path)} to begin a new run with its adapter."
        )
    cfg = replace(was, steps=steps, extended=[*was.extended, was.steps])
    validate(cfg)
    run.check()
    run.starting_point(was)  # of a record that lacks a step it says so: DONE is still there then
    preflight.check(cfg, run.path)
    run.refuse_other_device("cuda" if cfg.device != "cpu" and preflight.has_gpu() else "cpu")
    if questions := preflight.questions(cfg):
        run.refuse_other_data(questions)
    with run.locked():
        run.extend(cfg)
