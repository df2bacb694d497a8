"""Options of `python -m qerl_lab.tools.warmup`, and their check. Imports no torch."""

import math
from dataclasses import dataclass

from qerl_lab.config.files import choices_of
from qerl_lab.config.option import ConfigError, did_you_mean, option
from qerl_lab.config.out import Writes, check_apart, check_free
from qerl_lab.config.records import WARMUP
from qerl_lab.config.schema import DEVICES, TaskConfig
from qerl_lab.model import on_disk
from qerl_lab.tasks import configured, with_solutions
from qerl_lab.tasks.question_files import is_local


@dataclass
class WarmupOptions(Writes):
    model: str = option("", "what to teach: hub id, dense directory, FILE.gguf, or `pocket`; required")
    revision: str | None = option(None, "branch, tag or commit on the hub; null is the newest")
    task: str = option("gsm8k", "whose worked solutions are taught: gsm8k or arithmetic")
    task_path: str | None = option(None, "as task.path of a run: directory or hub id; null: the task's own")
    instruction: str | None = option(None, "as task.instruction of a run; null: that of conf/task, as in a run")
    out: str = option("", "directory to write, a model as any other; required")
    epochs: float = option(3.0, "passes over the solutions; 0.1 is a try", above=0, at_most=1000)
    learning_rate: float = option(
        5e-4, "peak learning rate; for 135M parameters, larger models take less (1e-5 for 7B)", above=0, at_most=1
    )
    warmup_ratio: float = option(0.03, "share of the updates with linear warm-up; a cosine to a tenth follows",
                                 at_least=0, at_most=1)  # fmt: skip
    weight_decay: float = option(0.0, "decoupled weight decay of AdamW", at_least=0, at_most=1e3)
    max_grad_norm: float = option(1.0, "gradient clipping norm", at_least=1e-6, at_most=1e12)
    batch_size: int = option(64, "solutions an update", at_least=1, at_most=65_536)
    micro_batch_size: int = option(8, "solutions per forward and backward pass, a divisor of batch_size", at_least=1)
    max_tokens: int = option(512, "longer examples, question and solution, are left out and counted", at_least=2)
    questions: int = option(0, "the first so many questions; 0 is all", at_least=0)
    dtype: str = option(
        "float32",
        "of weights and optimizer while they train; float32 multiplies in bfloat16 on a GPU. Written is bfloat16",
        choices=("float32", "bfloat16"),
    )
    seed: int = option(0, "seeds the order of the solutions, and dropout where a model has it", at_least=0,
                       at_most=2**31 - 1)  # fmt: skip
    device: str = option("auto", "auto takes a GPU if there is one", choices=DEVICES)
    checkpoint_every: int = option(50, "updates between checkpoints, from which the same command goes on", at_least=1)
    overwrite: bool = option(False, "replace what is at `out`, and an unfinished directory of another command")

    def task_config(self) -> TaskConfig:
        """Return the `task` section that a run on the result has: same questions, same instruction."""
        given = {"path": self.task_path, "train_questions": self.questions, "instruction": self.instruction}
        return configured(self.task, **{key: value for key, value in given.items() if value is not None})


def check(options: WarmupOptions) -> None:
    """Raise ConfigError at the first option that cannot work. Looks at local paths, loads nothing."""
    if options.task not in choices_of("task"):
        allowed = with_solutions()
        hint = did_you_mean(options.task, allowed) or " Type task=gsm8k."
        raise ConfigError(f"task={options.task} is not allowed; allowed: {', '.join(allowed)}.{hint}")
    if folder := on_disk.local(options.model, "model"):
        on_disk.check_files(folder, f"model={options.model}")
        on_disk.check_chat_template(folder, f"model={options.model}")
    if options.task_path is not None:
        is_local(options.task_path, "task_path=")
    if options.batch_size % min(options.micro_batch_size, options.batch_size):
        raise ConfigError(
            f"micro_batch_size={options.micro_batch_size} does not divide batch_size={options.batch_size}; allowed: a "
            f"divisor. Type for example micro_batch_size={math.gcd(options.micro_batch_size, options.batch_size)}."
        )
    check_apart(options, options.model)
    check_free(options, options.overwrite, lambda folder: (folder / WARMUP).is_file())
