"""Make the pocket policy from random weights: `python results/pocket/pretrain.py out=DIR [seed=0] [updates=650]`.

The pocket policy is the model that the package embeds: a Qwen2 of about 0.9M parameters, trained on worked solutions of
`task=arithmetic`, never on held-out problems. After the last update about half of the answers are right, so
reinforcement learning can raise or lower this share. `recipe.json`, beside the weights, holds the recipe and the
SHA-256 of every file.
"""

import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from qerl_lab import tasks
from qerl_lab.cli.grammar import Command
from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.paths import sha256
from qerl_lab.config.records import RECIPE
from qerl_lab.config.schema import TaskConfig
from qerl_lab.model.chat import Chat
from qerl_lab.system import exits, terminal
from qerl_lab.system.disk import make_directory
from qerl_lab.tasks import arithmetic
from qerl_lab.tasks.answers.completion import TAGS
from qerl_lab.tools.warmup import worked_example

LINE = "python results/pocket/pretrain.py"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """All numbers that determine the weights of the small model that the package embeds (`pocket`)."""

    seed: int = 0
    updates: int = 650
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_updates: int = 40
    vocab_size: int = 512
    hidden_size: int = 160
    intermediate_size: int = 448
    num_layers: int = 3
    num_heads: int = 5
    num_kv_heads: int = 1
    max_positions: int = 2048


@dataclass
class PretrainOptions:
    out: str = option("", "directory to write, empty or missing; required")
    seed: int = option(Recipe.seed, "seed of the weights and the problems", at_least=0, at_most=2**32 - 1)
    updates: int = option(Recipe.updates, "optimizer updates", at_least=1)


def make(options: PretrainOptions) -> None:
    """Train the small Qwen2 that the package embeds as `model=pocket`, and write it to `options.out`.

    Raises ConfigError if `options.out` cannot be written or is not empty.
    """
    out = Path(options.out).expanduser()
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"out={options.out} is not empty. Type another directory.")
    make_directory(out, f"out={options.out}")
    terminal.quiet_third_parties()
    recipe = Recipe(seed=options.seed, updates=options.updates)
    model, tokenizer = train(recipe, tasks.read_task_config("arithmetic"))
    model.to(torch.bfloat16).save_pretrained(out)  # the formats start from it
    tokenizer.save_pretrained(out)
    record = {
        "command": f"{LINE} out=DIR",
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "sha256": {path.name: sha256(path) for path in sorted(out.iterdir())},
    }
    (out / RECIPE).write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {out}")


def train(recipe: Recipe, cfg: TaskConfig) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Train a tokenizer and a model on worked solutions of the task `cfg`; return both.

    Prints the loss every 20 updates.
    """
    task, source = tasks.load(cfg), examples(cfg, random.Random(recipe.seed))
    tokenizer = make_tokenizer(recipe, [
        f"system\n{task.instruction}\nuser\n{question.prompt}\nassistant\n{question.payload['solution']}"
        for question in itertools.islice(source, 4000)
    ])  # fmt: skip
    model = make_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for update in range(recipe.updates):
        if update < recipe.warmup_updates:
            share_of_peak = (update + 1) / recipe.warmup_updates
        else:  # a cosine to a tenth of the peak
            done = (update - recipe.warmup_updates) / max(1, recipe.updates - recipe.warmup_updates)
            share_of_peak = 0.1 + 0.45 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * share_of_peak
        loss = model(**batch_of(task, tokenizer, [next(source) for _ in range(recipe.batch_size)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update % 20 == 0 or update == recipe.updates - 1:
            print(f"update {update:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)
    return model, tokenizer


def examples(cfg: TaskConfig, rng: random.Random) -> Iterator[tasks.Question]:
    """Yield arithmetic problems drawn from `rng` with worked solutions, without end. Leaves out held-out problems."""
    while True:
        drawn = arithmetic.draw_problem(rng, cfg)
        if not drawn.is_heldout:
            yield arithmetic.worked_question(rng, drawn)


def make_tokenizer(recipe: Recipe, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`. It encodes any text; digits stay single tokens, as in Qwen2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size - len(TAGS), initial_alphabet=alphabet, special_tokens=CONTROL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(TAGS))  # single tokens, not "special" tokens: decoding would drop these
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHAT_TEMPLATE,
        padding_side="left", model_max_length=recipe.max_positions, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def make_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Make a Qwen2 of the recipe's size with seeded random weights in float32."""
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=recipe.hidden_size, intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers, num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads, max_position_embeddings=recipe.max_positions,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    return Qwen2ForCausalLM(config)


def batch_of(
    task: tasks.Task, tokenizer: PreTrainedTokenizerFast, questions: list[tasks.Question]
) -> dict[str, torch.Tensor]:
    """Tokenize questions with their worked solutions into a padded batch to train on.

    Returns input_ids, attention_mask and labels, each [questions, longest]. Tokens of the question have no loss.
    """
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # prints at import, until `make` quiets it

    chat = Chat(tokenizer)
    rows = [worked_example(chat, task, question) for question in questions]
    return DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)(rows)


COMMAND = Command(
    LINE,
    "Make the embedded pocket policy.",
    PretrainOptions,
    make,
    examples=((f"{LINE} out=pocket", "the policy of the package, in minutes"),),
    required=("out",),
)


if __name__ == "__main__":
    exits.run(exits.command(COMMAND.run))
