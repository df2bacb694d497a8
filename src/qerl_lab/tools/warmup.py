"""Train a model on the format of the answers: `python -m qerl_lab.tools.warmup model=... task=gsm8k out=DIR`.

TRL's SFTTrainer trains all weights on worked solutions of a task. The options are checked before torch is imported.
Operations are deterministic, so two GPUs of one kind with the same packages make the same model, and runs on it can be
pooled.
"""

import copy
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_lab import tasks
from qerl_lab.cli.grammar import Command
from qerl_lab.config.message import first_and_last, with_noun
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.paths import module_hash
from qerl_lab.config.records import WARMUP
from qerl_lab.config.redact import redact_and_join
from qerl_lab.config.schema import DEVICES, POCKET, TaskConfig
from qerl_lab.config.spelling import hydra_override, shell_line
from qerl_lab.model import on_disk
from qerl_lab.record.environment import installed_versions
from qerl_lab.record.out import OutputOptions, Unfinished, check_apart, check_free
from qerl_lab.system import exits, terminal
from qerl_lab.tasks.answers.completion import without_answer_start
from qerl_lab.tasks.question_files import is_local, reword_path_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from qerl_lab.model.chat import Chat

LINE = "python -m qerl_lab.tools.warmup"
SCALES = {POCKET: POCKET, "SmolLM2-135M": "smollm2"}  # part of a model's path -> the scale made for it
IGNORED = -100  # label of a token without loss
WARMUP_RATIO = 0.03  # share of the updates with linear warm-up; then the rate falls as a cosine to a tenth of the peak
Rows = list[dict[str, list[int]]]


@dataclass
class WarmupOptions(OutputOptions):
    model: str = option("", "model to teach: hub id, dense directory, FILE.gguf, or `pocket`; required")
    revision: str | None = option(None, "branch, tag or commit on the hub; null is the newest")
    task: str = option("gsm8k", "task with worked solutions, which are taught", choices=tasks.names_with("worked"))
    task_path: str | None = option(None, "as task.path of a run: directory or hub id; null: the task's own")
    task_module: str | None = option(None, "as task.module of a run: FILE.py with `worked(cfg)`; null: the task's own")
    instruction: str | None = option(None, "as task.instruction of a run; null: as in conf/task")
    out: str = option("", "directory to write; it can be used as any other model; required")
    epochs: float = option(3.0, "passes over the solutions; 0.1 is a try", above=0, at_most=1000)
    learning_rate: float = option(
        5e-4, "peak learning rate; the default is for 135M parameters, 7B needs about 1e-5", above=0, at_most=1
    )
    batch_size: int = option(64, "solutions per update", at_least=1, at_most=65_536)
    micro_batch_size: int = option(8, "solutions per forward and backward pass, a divisor of batch_size", at_least=1)
    max_tokens: int = option(
        512, "longest example, with its question; longer ones are left out and counted", at_least=2
    )
    questions: int = option(0, "how many questions to use, from the first; 0 is all", at_least=0)
    dtype: str = option(
        "float32",
        "dtype of weights and optimizer in training; float32 multiplies in bfloat16 on a GPU. The output is bfloat16",
        choices=("float32", "bfloat16"),
    )
    seed: int = option(0, "seed of the order of the solutions, and of dropout if the model has it", at_least=0,
                       at_most=2**31 - 1)  # fmt: skip
    device: str = option("auto", "auto takes a GPU if there is one", choices=DEVICES)
    overwrite: bool = option(False, "replace what is at `out`")

    def task_config(self) -> TaskConfig:
        """Return the task's configuration with the path, file, number of questions and instruction of these options."""
        return tasks.read_task_config(self.task, train_questions=self.questions, **self.given_task_keys())

    def given_task_keys(self) -> dict[str, str]:
        """Return the keys of `task` that the user typed here, with their values. A later run needs them too."""
        given = {"path": self.task_path, "module": self.task_module, "instruction": self.instruction}
        return {key: value for key, value in given.items() if value is not None}


def check(options: WarmupOptions) -> None:
    """Raise ConfigError at the first option that cannot work, without loading anything."""
    if folder := on_disk.local_path(options.model, "model"):
        on_disk.check_chat_model(folder, f"model={options.model}")
    if options.task_path is not None:
        is_local(options.task_path, "task_path=")
    if options.task_module is not None:
        module_hash(options.task_module, "task_module=")
    if options.batch_size % min(options.micro_batch_size, options.batch_size):
        raise ConfigError(
            f"micro_batch_size={options.micro_batch_size} does not divide batch_size={options.batch_size}; allowed: a "
            f"divisor. Type for example micro_batch_size={math.gcd(options.micro_batch_size, options.batch_size)}."
        )
    check_apart(options, options.model)
    check_free(options.folder, options.out, WARMUP, overwrite=options.overwrite)


def warm_up(options: WarmupOptions) -> None:
    """Fine-tune all weights of a model on a task's worked solutions; write it and warmup.json to `options.out`.

    Raises ConfigError if an option cannot work, or model or task cannot be loaded; ValueError if the model lacks a
    weight, has NaN or Inf, or the training diverged.
    """
    check(options)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]  # TRL refuses several GPUs in one process
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch requires it for deterministic operations
    with terminal.quiet_imports():
        import torch

        from qerl_lab.model import policy, weight_files
        from qerl_lab.model.chat import load_tokenizer
        from qerl_lab.model.loading import load_by_transformers, require_dense
    torch.use_deterministic_algorithms(True)
    started, device = time.monotonic(), policy.device_of(options.device)
    try:
        task = tasks.load(options.task_config(), training="worked")
    except ConfigError as error:
        error = reword_path_error(error, "task_path=")
        raise ConfigError(str(error).replace("task.module=", "task_module=")) from error
    for line in task.warnings:
        print(f"note: {line}", file=sys.stderr)
    folder = weight_files.local_folder(options.model, options.revision, key="model")
    origin = {"path": str(folder), "revision": options.revision, "hash": model_hash(folder)}
    record: dict[str, Any] = {
        "command": redact_and_join(["python", "-m", "qerl_lab.tools.warmup", *sys.argv[1:]]),
        "options": asdict(options), "instruction": task.instruction, "solutions": dict(task.data),
        "began_from": origin | weight_files.lab_records(folder),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }  # fmt: skip
    require_dense(folder, f"model={options.model}", "because all its weights are trained. Type its path.")
    tokenizer = load_tokenizer(folder)
    model = load_by_transformers(folder, getattr(torch, options.dtype))
    rows, record["too_long"] = tokenize(task, tokenizer, options.max_tokens)
    with Unfinished(options.folder, {}, options.overwrite) as unfinished:
        losses = train(options, model.to(device), tokenizer, rows, unfinished.folder)
        weight_files.copy_companions(folder, unfinished.folder)
        model.to(torch.bfloat16).save_pretrained(unfinished.folder)  # the formats start from it
        record |= {
            "losses": [round(loss, 4) for loss in losses], "seconds": round(time.monotonic() - started, 1),
            "packages": installed_versions(("qerl-lab", "torch", "transformers", "trl")),
            "sha256": unfinished.hashes(),
        }  # fmt: skip
        (unfinished.folder / WARMUP).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        unfinished.finish()
    loss = first_and_last(losses[0], losses[-1], len(losses))
    print(f"loss {loss} nats a token, {time.monotonic() - started:.0f} s")
    print(f"model:       {terminal.format_path(options.folder)}  ({WARMUP} says how it was made)")
    print(f"train on it: {terminal.python_command()} -m qerl_lab {shell_line(training_overrides(options))}")


def worked_example(chat: "Chat", task: tasks.Task, question: tasks.Question) -> dict[str, list[int]]:
    """Tokenize a question with its worked solution as a training example: `input_ids` and `labels`.

    `input_ids` are the prompt as in a run, then the solution and the end token. If the prompt already opens the
    solution (by its chat template), that beginning is left out of the solution. `labels` are the same ids, with IGNORED
    for the prompt.
    """
    prompt = chat.prompt_ids(task.messages(question))
    solution = without_answer_start(chat.tokenizer.decode(prompt), question.payload["solution"])
    ids = [*chat.tokenizer(solution, add_special_tokens=False)["input_ids"], chat.tokenizer.eos_token_id]
    return {"input_ids": prompt + ids, "labels": [IGNORED] * len(prompt) + ids}


def tokenize(task: tasks.Task, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> tuple[Rows, int]:
    """Tokenize the task's worked solutions; return examples of at most `max_tokens`, and the number of longer ones.

    Prints notes on the chat template and on examples left out. Raises ConfigError if no example is left.
    """
    from qerl_lab.model.chat import Chat

    chat = Chat(tokenizer, "instruction")
    rows = [worked_example(chat, task, question) for question in task.train]
    rows = [row for row in rows if len(row["input_ids"]) <= max_tokens]
    for note in chat.notes:
        print(f"note: {note}", file=sys.stderr)
    left_out = len(task.train) - len(rows)
    if not rows:
        raise ConfigError(
            f"{task.name} has no worked solution, or none fits: {left_out:,} are longer than max_tokens={max_tokens}. "
            "Type a larger max_tokens, or task_path=DIRECTORY with train.jsonl and test.jsonl."
        )
    if left_out:
        print(f"note: {left_out} examples are left out, because they are longer than max_tokens={max_tokens}")
    return rows, left_out


def train(
    options: WarmupOptions, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", rows: Rows, folder: Path
) -> list[float]:
    """Train all weights of `model` on `rows` (from `tokenize`); return each update's loss in nats per token.

    `folder` is the output directory for TRL. Raises ValueError if a loss is not finite.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from qerl_lab.model.chat import pad_id

    on_gpu, updates = model.device.type == "cuda", count_updates(options.epochs, len(rows), options.batch_size)
    config = SFTConfig(
        output_dir=str(folder), save_strategy="no", max_steps=updates, seed=options.seed, use_cpu=not on_gpu,
        per_device_train_batch_size=min(options.micro_batch_size, options.batch_size),
        gradient_accumulation_steps=max(1, options.batch_size // options.micro_batch_size),
        learning_rate=options.learning_rate, lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=round(WARMUP_RATIO * updates),
        optim="adamw_torch", bf16=on_gpu and options.dtype == "float32", gradient_checkpointing=False,
        max_length=None, dataset_kwargs={"skip_prepare_dataset": True},  # done by `tokenize`
        logging_steps=1, logging_nan_inf_filter=False, report_to="none",
    )  # fmt: skip
    print(f"{Path(options.model).name}, {model.num_parameters():,} parameters in {options.dtype}, on {model.device}\n"
          f"{len(rows):,} solutions of {Path(options.task_module or options.task).stem}, "
          f"{with_noun(updates, 'update')} of {options.batch_size}, learning rate {options.learning_rate:g}",
          flush=True)  # fmt: skip
    pad = pad_id(tokenizer, model.get_input_embeddings().num_embeddings)
    before = copy.deepcopy((model.config, model.generation_config))
    trainer = SFTTrainer(
        model, config, data_collator=DataCollatorForLanguageModeling(pad_token_id=pad),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    model.config, model.generation_config = before  # undo the trainer's changes: cache off, other end tokens
    losses: list[float] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    for update, loss in enumerate(losses, 1):
        if not math.isfinite(loss):
            raise ValueError(f"the loss of update {update} is {loss}. Type a smaller learning_rate than "
                             f"{options.learning_rate:g}.")  # fmt: skip
    return losses


def count_updates(epochs: float, rows: int, batch_size: int) -> int:
    """Return the number of updates in `epochs` passes; the last update of a pass takes the rows that are left."""
    rest, passes = math.modf(epochs)
    return int(passes) * math.ceil(rows / batch_size) + math.ceil(rest * rows / batch_size)


def training_overrides(options: WarmupOptions) -> list[str]:
    """Return the command-line overrides (`key=value`) with which the main command trains the new model."""
    scale = next((scale for name, scale in SCALES.items() if name in options.model), "custom")
    model = hydra_override("model.path", terminal.format_path(options.folder))
    words = ["+experiment=nvfp4_aqn", f"scale={scale}", model]
    words += [] if options.task == "arithmetic" else [f"task={options.task}"]
    return words + [hydra_override(f"task.{key}", value) for key, value in options.given_task_keys().items()]


COMMAND = Command(
    LINE,
    "Teach a model the format of the answers: supervised training of all weights on a task's worked solutions",
    WarmupOptions,
    warm_up,
    examples=(
        (f"{LINE} model=models/SmolLM2-135M-Instruct.Q4_1.gguf out=models/smollm2-gsm8k", "minutes, on a GPU"),
        (f"{LINE} model=pocket task=arithmetic epochs=0.1 out=models/pocket", "a try without a GPU or a hub"),
        ("python -m qerl_lab +experiment=nvfp4 scale=smollm2 model.path=models/smollm2-gsm8k", "train on the result"),
    ),
    required=("model", "out"),
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
