"""Pretrain the pocket policy from random weights, for `python -m qerl_lab.tools.pretrain out=DIR`.

The policy is a Qwen2-architecture model of about 0.9M parameters, trained on worked solutions of `task=arithmetic`,
never on held-out problems. Training stops at about half the answers right, which leaves room for reinforcement learning
in both directions. It is seeded and takes minutes on two cores. `recipe.json`, beside the weights, holds the recipe and
the SHA-256 of every file.
"""

import json
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from qerl_lab import tasks
from qerl_lab.config.paths import sha256
from qerl_lab.config.records import RECIPE
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Task, arithmetic
from qerl_lab.tools.pocket_recipe import Recipe

# Format tags are single tokens, but not "special" ones, which decoding would drop.
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
IGNORED = -100  # label of a token without loss
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def examples(cfg: TaskConfig, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (question, worked solution) without end; none is from the held-out set."""
    while True:
        drawn = arithmetic.problem(rng, cfg)
        if not drawn.is_heldout:
            yield drawn.text, arithmetic.worked_solution(rng, drawn)


def make_tokenizer(recipe: Recipe, texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which reads any text; digits stay single tokens, as in Qwen2."""
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
    tokenizer.add_tokens(TAGS)
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


def batch_of(task: Task, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Return input_ids, attention_mask and labels [pairs, longest]; only solution and end token are labelled."""
    rows = []
    for text, solution in pairs:
        messages = task.messages(tasks.Question("", text, ""))
        chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompt, learned = tokenizer(chat)["input_ids"], tokenizer(solution + "<|im_end|>")["input_ids"]
        rows.append({"input_ids": prompt + learned, "labels": [IGNORED] * len(prompt) + learned})
    return DataCollatorForLanguageModeling(pad_token_id=tokenizer.pad_token_id)(rows)


def learning_rate(recipe: Recipe, update: int) -> float:
    """Return the learning rate of an update, from 0 on: linear warm-up, then cosine to a tenth of the peak."""
    if update < recipe.warmup_updates:
        return recipe.learning_rate * (update + 1) / recipe.warmup_updates
    share = (update - recipe.warmup_updates) / max(1, recipe.updates - recipe.warmup_updates)
    return recipe.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


def pretrain(recipe: Recipe, cfg: TaskConfig) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Train tokenizer and model by the recipe; print the loss every 20 updates."""
    task, rng = tasks.load(cfg), random.Random(recipe.seed)
    source = examples(cfg, rng)
    texts = [
        f"system\n{task.instruction}\nuser\n{text}\nassistant\n{solution}"
        for text, solution in (next(source) for _ in range(4000))
    ]
    tokenizer = make_tokenizer(recipe, texts)
    model = make_model(recipe, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for update in range(recipe.updates):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, update)
        loss = model(**batch_of(task, tokenizer, [next(source) for _ in range(recipe.batch_size)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if update % 20 == 0 or update == recipe.updates - 1:
            print(f"update {update:4d}  loss {loss.item():.4f}  {time.perf_counter() - started:.0f} s", flush=True)
    return model, tokenizer


def save(folder: Path, recipe: Recipe, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write weights in bfloat16 (the formats start from it), tokenizer, and recipe.json."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = sorted(path for path in folder.iterdir() if path.name != RECIPE)
    record = {
        "command": "python -m qerl_lab.tools.pretrain out=DIR",
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "torch": torch.__version__,
        "sha256": {path.name: sha256(path) for path in files},
    }
    (folder / RECIPE).write_text(json.dumps(record, indent=1) + "\n")
