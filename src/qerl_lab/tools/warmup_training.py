"""Train a model on worked solutions of a task with TRL's SFTTrainer: read, tokenize, train, write, rename.

Output goes to OUT.partial, which is renamed to OUT once it is whole. The trainer's checkpoints lie there too; its
resume restores weights, optimizer, order and random state, so an interrupted warm-up ends bit-identical. On a GPU all
operations are deterministic, so two GPUs of one kind with the same packages make the same model, and runs on it can be
pooled.
"""

import copy
import json
import math
import os
import shlex
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PrinterCallback,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from qerl_lab import tasks, terminal
from qerl_lab.config.message import first_line
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256
from qerl_lab.config.records import WARMUP
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import POCKET
from qerl_lab.config.spelling import shell_line, word
from qerl_lab.model import policy
from qerl_lab.model.chat import Chat, pad_id, save_tokenizer
from qerl_lab.model.files import local_folder, noted
from qerl_lab.model.loading import check_dense_values, refuse_packed
from qerl_lab.record.environment import versions
from qerl_lab.record.partial import JOURNAL, Unfinished
from qerl_lab.tasks import Task
from qerl_lab.tasks.answers.completion import left_to_say
from qerl_lab.tasks.data import respelled
from qerl_lab.tools.warmup_options import WarmupOptions

NOT_IDENTITY = ("out", "checkpoint_every", "overwrite")
SCALES = {POCKET: POCKET, "SmolLM2-135M": "smollm2"}  # scales made for a model, by part of its path
CHECKPOINTS, STATE = "checkpoints", "trainer_state.json"  # the trainer writes this file last in each checkpoint
IGNORED = -100  # label of a token without loss
Rows = list[dict[str, list[int]]]


class Watch(TrainerCallback):
    """Show each update, stop at a loss that is not finite, and record each whole checkpoint in the journal."""

    def __init__(self, options: WarmupOptions, unfinished: Unfinished, bar: terminal.Amount) -> None:
        self.options, self.unfinished, self.bar = options, unfinished, bar

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        if (loss := logs.get("loss")) is None:  # the trainer's final summary
            return
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of update {state.global_step} is {loss}. Type a smaller learning_rate than "
                f"{self.options.learning_rate:g}, and overwrite=true."
            )
        self.bar.advance(1, f"loss {loss:.3f}")

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.unfinished.note(f"{CHECKPOINTS}/checkpoint-{state.global_step}/{STATE}")


def run(options: WarmupOptions) -> None:
    """Train by `options`, from the newest checkpoint if there is one, and write the model to OUT.

    Raises:
        ConfigError: model or task cannot be loaded, or OUT.partial belongs to another command.
        ValueError: the training diverged.
    """
    started, device = time.monotonic(), policy.device_of(options.device)
    sum_in_one_order()
    task = worked(options)
    for line in task.warnings:
        print(f"note: {line}", file=sys.stderr)
    folder = local_folder(options.model, options.revision, key="model")
    model, tokenizer = load(options, folder, device)
    rows, left_out = tokenized(task, tokenizer, options.max_tokens)
    began = {"path": str(folder), "revision": options.revision, "hash": model_hash(folder), **noted(folder)}
    with Unfinished(options.folder, identity(options, task, folder, device), options.overwrite) as unfinished:
        saved = newest(unfinished)
        config = sft_config(options, len(rows), device, unfinished.folder / CHECKPOINTS)
        done = int(saved.name.rpartition("-")[2]) if saved else 0
        print(opening(options, model, len(rows), left_out, config.max_steps, done), flush=True)
        with terminal.Amount("warm-up", config.max_steps, done, unit="update") as bar:
            losses = train(config, model, tokenizer, rows, Watch(options, unfinished, bar), saved)
        record = about(options, task, device, left_out) | {"began_from": began, "updates": len(losses)}
        record |= {"losses": [round(loss, 4) for loss in losses]}
        record["seconds_of_the_last_session"] = round(time.monotonic() - started, 1)
        write(model, tokenizer, unfinished.folder, record)
        shutil.rmtree(unfinished.folder / CHECKPOINTS)
        unfinished.finish()
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token, {time.monotonic() - started:.0f} s")
    print(f"model:       {terminal.near(options.folder)}  ({WARMUP} says how it was made)")
    print(f"train on it: {terminal.python()} -m qerl_lab {shell_line(training_words(options))}")


def worked(options: WarmupOptions) -> Task:
    """Load the task with worked solutions. Errors (ConfigError) name this command's keys."""
    try:
        return tasks.worked(options.task_config())
    except ConfigError as error:
        raise respelled(error, "task_path=") from error


def sum_in_one_order() -> None:
    """Make torch use only deterministic operations; operations without one raise RuntimeError."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch
    torch.use_deterministic_algorithms(True)


def load(options: WarmupOptions, folder: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model in `options.dtype` on the device, and its tokenizer.

    Raises ConfigError if there is no model, if it is packed, or if its weights contain NaN or Inf.
    """
    said = f"model={options.model}"
    refuse_packed(folder, said, "all of whose weights are trained. Type its path.")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, options.dtype), use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        for name, parameter in model.named_parameters():
            check_dense_values(parameter, name=f"{folder}: {name}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{said} could not be loaded ({type(error).__name__}: {first_line(error)}). "
                          "Type another model.") from error  # fmt: skip
    return model.to(device), tokenizer


def tokenized(task: Task, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[Rows, int]:
    """Return the examples of at most `max_tokens` as input_ids and labels, and how many are longer.

    The question has the chat format of a run. Only tokens of the solution and its end are labelled. Raises ConfigError
    if there is no solution, or if all are too long.
    """
    found, chat = Rows(), Chat(tokenizer)
    for question in task.train:
        prompt = chat.prompt_ids(task.messages(question))
        solution = left_to_say(tokenizer.decode(prompt), question.payload["solution"])
        ids = [*tokenizer(solution, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        found.append({"input_ids": prompt + ids, "labels": [IGNORED] * len(prompt) + ids})
    for note in chat.notes:
        print(f"note: {note}", file=sys.stderr)
    if not found:
        raise ConfigError(f"{task.name} has no worked solution. Type task_path=DIRECTORY with train.jsonl.")
    lengths = [len(row["input_ids"]) for row in found]
    fitting = [row for row, length in zip(found, lengths, strict=True) if length <= max_tokens]
    if not fitting:
        raise ConfigError(
            f"max_tokens={max_tokens} leaves out all {len(found):,} examples; the shortest has {min(lengths)} tokens. "
            f"Type max_tokens={max(lengths)}."
        )
    return fitting, len(found) - len(fitting)


def sft_config(options: WarmupOptions, count: int, device: torch.device, folder: Path) -> SFTConfig:
    """Return TRL's settings of a warm-up on `count` examples. `max_steps` is its number of updates."""
    updates, on_gpu = math.ceil(options.epochs * count / options.batch_size), device.type == "cuda"
    return SFTConfig(
        output_dir=str(folder), max_steps=updates, seed=options.seed, use_cpu=not on_gpu,
        per_device_train_batch_size=min(options.micro_batch_size, options.batch_size),
        gradient_accumulation_steps=max(1, options.batch_size // options.micro_batch_size),
        learning_rate=options.learning_rate, lr_scheduler_type="cosine_warmup_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1}, warmup_steps=round(options.warmup_ratio * updates),
        optim="adamw_torch", weight_decay=options.weight_decay, max_grad_norm=options.max_grad_norm,
        bf16=on_gpu and options.dtype == "float32", gradient_checkpointing=False,
        max_length=None, dataset_kwargs={"skip_prepare_dataset": True},  # done by tokenized()
        save_steps=options.checkpoint_every, save_total_limit=2,  # the older one counts until the newest is recorded
        logging_steps=1, logging_nan_inf_filter=False, report_to="none", disable_tqdm=True,
    )  # fmt: skip


def newest(unfinished: Unfinished) -> Path | None:
    """Return the newest whole checkpoint; None without one."""
    files = (unfinished.folder / CHECKPOINTS).glob(f"checkpoint-*/{STATE}")
    whole = [file.parent for file in files if unfinished.has(str(file.relative_to(unfinished.folder)))]
    return max(whole, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def train(
    config: SFTConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: Rows, watch: Watch,
    saved: Path | None,
) -> list[float]:  # fmt: skip
    """Train all weights of `model`, from a checkpoint if given; return each update's loss in nats per token."""
    pad = pad_id(tokenizer, model.get_input_embeddings().num_embeddings)
    own = copy.deepcopy((model.config, model.generation_config))
    trainer = SFTTrainer(
        model, config, data_collator=DataCollatorForLanguageModeling(pad_token_id=pad),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[watch],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=str(saved) if saved else None)
    model.config, model.generation_config = own  # undo the trainer's changes: cache off, other end tokens
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def identity(options: WarmupOptions, task: Task, folder: Path, device: torch.device) -> dict[str, Any]:
    """Return the settings and inputs that determine the weights, to check a resume."""
    chosen = {key: value for key, value in asdict(options).items() if key not in NOT_IDENTITY}
    content = {"hash": model_hash(folder)}
    return chosen | {"device": device.type, "solutions": task.data["training_sha256"], "the model": content}


def opening(options: WarmupOptions, model: PreTrainedModel, count: int, left_out: int, updates: int, done: int) -> str:
    """Say what is trained on which model, and from which update on."""
    lines = [
        f"{Path(options.model).name}, {model.num_parameters():,} parameters in {options.dtype}, on {model.device.type}",
        f"{count:,} solutions of {options.task}, {updates} updates of {options.batch_size}, "
        f"learning rate {options.learning_rate:g}",
    ]
    if left_out:
        lines.append(f"note: {left_out} examples are longer than max_tokens={options.max_tokens}, and left out")
    if done:
        lines.append(f"continuing after update {done}")
    return "\n".join(lines)


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, record: dict[str, Any]) -> None:
    """Write weights in bfloat16 (the formats start from it), tokenizer, chat template, and warmup.json."""
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (WARMUP, JOURNAL))
    record["sha256"] = {file.name: sha256(file) for file in files}
    (folder / WARMUP).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def about(options: WarmupOptions, task: Task, device: torch.device, left_out: int) -> dict[str, Any]:
    """Return what warmup.json records about the command, its data and its machine."""
    return {
        "command": redact(shlex.join(["python", "-m", "qerl_lab.tools.warmup", *sys.argv[1:]])),
        "options": asdict(options),
        "instruction": task.instruction,
        "solutions": dict(task.data) | {"too_long": left_out},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "packages": versions(("qerl-lab", "torch", "transformers", "trl")),
    }


def training_words(options: WarmupOptions) -> list[str]:
    """Return what to type after `python -m qerl_lab` to train on the result."""
    scales = [scale for name, scale in SCALES.items() if name in options.model]
    words = [
        "+experiment=nvfp4_aqn",
        f"scale={[*scales, 'custom'][0]}",
        word("model.path", terminal.near(options.folder)),
    ]
    words += [] if options.task == "arithmetic" else [f"task={options.task}"]
    further = {"path": options.task_path, "instruction": options.instruction}
    return words + [word(f"task.{key}", value) for key, value in further.items() if value is not None]
