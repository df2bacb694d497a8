"""One warm-up, from its options to its directory: read -> tokenize -> train, with checkpoints -> write -> rename.

Everything is written in OUT.partial, which is renamed to OUT when it is whole. An update depends on the weights, the
optimizer and its own number alone, so that a warm-up which was killed ends as one that was not, to the bit. On a GPU
sums have one order, so that two GPUs of one kind under the same packages make the same model: runs on it can be pooled.
"""

import hashlib
import json
import math
import os
import shlex
import shutil
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

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
from qerl_lab.model.files import local_folder, noted
from qerl_lab.model.loading import check_dense_values, refuse_packed
from qerl_lab.model.tokenizer import pad_id
from qerl_lab.model.tokenizer import save as save_tokenizer
from qerl_lab.record import checkpoint
from qerl_lab.record.environment import versions
from qerl_lab.record.partial import JOURNAL, Unfinished
from qerl_lab.tasks import Task
from qerl_lab.tasks.data import respelled
from qerl_lab.tools.solutions import Example, batch, learning_rate
from qerl_lab.tools.warmup_examples import order, tokenized
from qerl_lab.tools.warmup_options import WarmupOptions

NOT_IDENTITY = ("out", "checkpoint_every", "overwrite", "device")
SCALES = {POCKET: POCKET, "SmolLM2-135M": "smollm2"}  # made for a model, by a part of its path
CHECKPOINTS, WEIGHTS, OPTIMIZER = "checkpoints", "weights.safetensors", "optimizer.pt"


class Warmup:
    """A model in training. `updates` is their number, `losses` the mean loss of each so far, in nats a token."""

    def __init__(
        self, options: WarmupOptions, model: PreTrainedModel, examples: list[Example], pad: int, device: torch.device
    ) -> None:
        self.options, self.model, self.examples, self.pad, self.device = options, model, examples, pad, device
        self.updates = math.ceil(options.epochs * len(examples) / options.batch_size)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay
        )
        self.losses: list[float] = []

    def train(self, unfinished: Unfinished, bar: terminal.Amount) -> None:
        """Make the updates that are left, with checkpoints. Raises ValueError for a loss that is not finite."""
        self.model.train()
        drawn = islice(order(len(self.examples), self.options.seed), len(self.losses) * self.options.batch_size, None)
        while len(self.losses) < self.updates:
            taken = [self.examples[index] for index in islice(drawn, self.options.batch_size)]
            loss = self.update(taken)
            if not math.isfinite(loss):
                raise ValueError(
                    f"the loss of update {len(self.losses) + 1} is {loss}. Type a smaller learning_rate than "
                    f"{self.options.learning_rate:g}, and overwrite=true."
                )
            self.losses.append(loss)
            bar.advance(1, f"loss {loss:.3f}")
            if len(self.losses) % self.options.checkpoint_every == 0 or len(self.losses) == self.updates:
                saved = self.save(unfinished.folder / CHECKPOINTS)
                unfinished.note(str((saved / checkpoint.MANIFEST).relative_to(unfinished.folder)))  # to go on from

    def update(self, examples: list[Example]) -> float:
        """One step of the optimizer; the loss is the mean over all solution tokens of the update, in nats."""
        number, rising = len(self.losses), round(self.options.warmup_ratio * self.updates)
        torch.manual_seed(dropout_seed(self.options.seed, number))  # the same after an interruption
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options.learning_rate, rising, number, self.updates)
        examples = sorted(examples, key=lambda example: example.length)  # less padding in a micro-batch
        tokens, total, size = sum(len(example.solution) for example in examples), 0.0, self.options.micro_batch_size
        for first in range(0, len(examples), size):
            inputs = {
                key: value.to(self.device) for key, value in batch(examples[first : first + size], self.pad).items()
            }
            with self.precision():
                logits = self.model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), inputs["labels"][:, 1:].flatten(), reduction="sum"
            ) / tokens  # fmt: skip
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def precision(self) -> AbstractContextManager[Any]:
        """On a GPU float32 weights multiply in bfloat16."""
        mixed = self.device.type == "cuda" and self.options.dtype == "float32"
        return torch.autocast("cuda", torch.bfloat16) if mixed else nullcontext()

    def save(self, folder: Path) -> Path:
        done = len(self.losses)
        state = {
            "step": done, "prompts_seen": done * self.options.batch_size, "run_key": "",
            "config": {"losses": self.losses}, "device": self.device.type, "dtype": self.options.dtype,
        }  # fmt: skip

        def write(aside: Path) -> None:
            save_model(self.model, str(aside / WEIGHTS))
            torch.save(self.optimizer.state_dict(), aside / OPTIMIZER)

        return checkpoint.save(folder, state, write, keep=1)

    def go_on_from(self, saved: checkpoint.Saved) -> None:
        """Take weights, optimizer and losses of a checkpoint. Raises ConfigError for one of another device."""
        saved.refuse_other_device(self.device.type, self.options.dtype)
        load_model(self.model, str(saved.path / WEIGHTS), device=str(self.device))
        self.optimizer.load_state_dict(torch.load(saved.path / OPTIMIZER, map_location=self.device, weights_only=True))
        self.losses = list(saved.config["losses"])


def dropout_seed(seed: int, update: int) -> int:
    """A seed of 32 bits for one update. torch's generator on the CPU ignores all higher bits."""
    return int.from_bytes(hashlib.sha256(f"dropout/{seed}/{update}".encode()).digest()[:4], "big")


def run(options: WarmupOptions) -> None:
    """Write the model that `options` ask for.

    Raises:
        ConfigError: model or task cannot be loaded, or OUT.partial is of another command.
        ValueError: the training diverged.
    """
    started, device = time.monotonic(), policy.device_of(options.device)
    sum_in_one_order()
    task = worked(options)
    for line in task.warnings:
        print(f"note: {line}", file=sys.stderr)
    folder = local_folder(options.model, options.revision, key="model")
    model, tokenizer = load(options, folder, device)
    examples, left_out = tokenized(task, tokenizer, options.max_tokens)
    pad = pad_id(tokenizer, model.get_input_embeddings().num_embeddings)
    warmup = Warmup(options, model, examples, pad, device)
    began = {"path": str(folder), "revision": options.revision, "hash": model_hash(folder), **noted(folder)}
    with Unfinished(options.folder, identity(options, task, folder), options.overwrite) as unfinished:
        if saved := checkpoint.newest(unfinished.folder / CHECKPOINTS):
            warmup.go_on_from(saved)
        print(opening(warmup, left_out), flush=True)
        with terminal.Amount("warm-up", warmup.updates, len(warmup.losses), unit="update") as bar:
            warmup.train(unfinished, bar)
        write(warmup, tokenizer, unfinished.folder, about(options, task, began, warmup, left_out, started))
        shutil.rmtree(unfinished.folder / CHECKPOINTS)
        unfinished.finish()
    print(f"loss {warmup.losses[0]:.3f} -> {warmup.losses[-1]:.3f} nats a token, {time.monotonic() - started:.0f} s")
    print(f"model:       {terminal.near(options.folder)}  ({WARMUP} says how it was made)")
    print(f"train on it: {terminal.python()} -m qerl_lab {shell_line(training_words(options))}")


def worked(options: WarmupOptions) -> Task:
    """The task with its worked solutions. Raises ConfigError, which names the keys of this command."""
    try:
        return tasks.worked(options.task_config())
    except ConfigError as error:
        raise respelled(error, "task_path=") from error


def sum_in_one_order() -> None:
    """Let this process use only operations that give the same bits each time. torch raises where there is no such."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it
    torch.use_deterministic_algorithms(True)


def load(options: WarmupOptions, folder: Path, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in `options.dtype` on the device, and its tokenizer.

    Raises ConfigError for a packed one, for none, and for one with NaN or Inf in its weights.
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


def identity(options: WarmupOptions, task: Task, folder: Path) -> dict[str, Any]:
    """Return what decides the weights to be written."""
    chosen = {key: value for key, value in asdict(options).items() if key not in NOT_IDENTITY}
    content = {"hash": model_hash(folder)}
    return chosen | {"solutions": task.data["training_sha256"], "the model": content}


def opening(warmup: Warmup, left_out: int) -> str:
    options, count = warmup.options, sum(parameter.numel() for parameter in warmup.model.parameters())
    lines = [
        f"{Path(options.model).name}, {count:,} parameters in {options.dtype}, on {warmup.device.type}",
        f"{len(warmup.examples):,} solutions of {options.task}, {warmup.updates} updates of {options.batch_size}, "
        f"learning rate {options.learning_rate:g}",
    ]
    if left_out:
        lines.append(f"note: {left_out} examples are longer than max_tokens={options.max_tokens}, and left out")
    if warmup.losses:
        lines.append(f"continuing after update {len(warmup.losses)}")
    return "\n".join(lines)


def write(warmup: Warmup, tokenizer: PreTrainedTokenizerBase, folder: Path, record: dict[str, Any]) -> None:
    """Weights in bfloat16 (what the formats start from), tokenizer, chat template, and the record of it all."""
    warmup.model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name not in (WARMUP, JOURNAL))
    record["sha256"] = {file.name: sha256(file) for file in files}
    (folder / WARMUP).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def about(
    options: WarmupOptions, task: Task, began: dict[str, Any], warmup: Warmup, left_out: int, started: float
) -> dict[str, Any]:
    """What warmup.json says: the command, the data, the model it began from, how the loss went."""
    return {
        "command": redact(shlex.join(["python", "-m", "qerl_lab.tools.warmup", *sys.argv[1:]])),
        "options": asdict(options),
        "instruction": task.instruction,
        "began_from": began,
        "solutions": dict(task.data) | {"too_long": left_out},
        "updates": warmup.updates,
        "losses": [round(loss, 4) for loss in warmup.losses],
        "device": torch.cuda.get_device_name(warmup.device) if warmup.device.type == "cuda" else warmup.device.type,
        "seconds_of_the_last_session": round(time.monotonic() - started, 1),
        "packages": versions(("qerl-lab", "torch", "transformers")),
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
