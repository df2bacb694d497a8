"""Measure KL and entropies of a quantized model and its original on the same tokens."""

import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, ModelConfig, RunConfig
from qerl_lab.evaluate import kl
from qerl_lab.model import policy
from qerl_lab.model.chat import Chat
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.system import memory
from qerl_lab.tasks import arithmetic
from qerl_lab.tasks.answers.completion import without_answer_start

PROBLEMS = 16


def compare(options: QuantizeOptions, source: Path, folder: Path, weights: int, device: torch.device) -> dict[str, Any]:
    """Return KL(quantized || original) and the entropies of both, in nats per token, on the same tokens.

    `source` is the folder of the original, `folder` that of the quantized model, and `weights` the number of weights of
    either. The models are loaded one after the other; only log-probs of the original are kept. If the model fits
    neither GPU nor CPU memory, the dict has only `skipped`, the reason.
    """
    place = find_device_and_dtype(weights, device)
    if place is None:
        return {"skipped": f"{weights / 1e9:.1f} billion weights in bfloat16 fit neither the GPU nor the CPU memory"}
    where, dtype = place
    original_config = RunConfig(
        model=ModelConfig(path=str(source), dtype=dtype), format=FormatConfig(name=DENSE_FORMAT, ignore=["re:.*"])
    )
    quantized_config = RunConfig(model=ModelConfig(path=str(folder), dtype=dtype), format=options.format_config())
    model, tokenizer = policy.load_base(original_config, where)
    pairs = word_problem_pairs(tokenizer)
    original = [logprobs(model, pair) for pair in pairs]
    del model
    model, _ = policy.load_base(quantized_config, where)
    measured = list[Tensor]()
    for pair, p in zip(pairs, original, strict=True):
        q = logprobs(model, pair)
        measured.append(torch.stack([kl.per_token(q, p), kl.entropy_per_token(p), kl.entropy_per_token(q)]))
    lengths = [len(compared) for _, compared in pairs]
    divergence, before, after = (kl.mean(values_T, lengths) for values_T in torch.cat(measured, 1))
    return {
        "nats_per_token": divergence.nats, "standard_error": divergence.standard_error,
        "entropy_original": before.nats, "entropy_quantized": after.nats, "tokens": sum(lengths),
        "text": "word problems", "device": where.type, "dtype": dtype,
    }  # fmt: skip


def find_device_and_dtype(weights: int, device: torch.device) -> tuple[torch.device, str] | None:
    """Return a device and dtype whose free memory holds a dense model of `weights` weights; None if there is none.

    Prefers `device` if it is a GPU, in bfloat16; then the CPU in float32, then in bfloat16. CPU memory of unknown size
    counts as enough.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if 2.6 * weights < torch.cuda.mem_get_info()[0]:
            return device, "bfloat16"
    free = memory.available_bytes()
    for dtype, size in (("float32", 5.2 * weights), ("bfloat16", 2.6 * weights)):
        if free is None or size < free:
            return torch.device("cpu"), dtype
    return None


def logprobs(model: PreTrainedModel, pair: tuple[list[int], list[int]]) -> Tensor:
    """Return the model's log-probs [tokens, vocabulary] at the compared tokens; float32, on the CPU.

    `pair` has the token ids of the context and of the tokens to compare.
    """
    return torch.cat([chunk.cpu() for chunk in kl.logprobs(model, kl.hidden_states(model, [pair]))])


def word_problem_pairs(tokenizer: PreTrainedTokenizerBase) -> kl.Pairs:
    """Make pairs of token ids: a word problem as prompt, and its worked solution, on which models are compared.

    The PROBLEMS problems are the same at each call.
    """
    rng, cfg = random.Random(0), tasks.read_task_config("arithmetic")
    pairs, chat = [], Chat(tokenizer)
    for problem in [arithmetic.problem(rng, cfg) for _ in range(PROBLEMS)]:
        given = prompt_ids(chat, cfg.instruction, problem.text)
        solution = without_answer_start(tokenizer.decode(given), arithmetic.worked_solution(rng, problem))
        pairs.append((given, tokenizer(solution, add_special_tokens=False)["input_ids"]))
    return pairs


def prompt_ids(chat: Chat, instruction: str, question: str) -> list[int]:
    """Return the token ids of a prompt: `instruction` as system message, then `question`.

    If the chat template refuses system messages, one user message holds both. Without a chat template plain text does.
    """
    together = f"{instruction}\n\n{question}"
    if not chat.tokenizer.chat_template:
        return chat.tokenizer(f"{together}\n\n")["input_ids"]
    try:
        return chat.prompt_ids([{"role": "system", "content": instruction}, {"role": "user", "content": question}])
    except ConfigError:  # the template rejects system messages
        return chat.prompt_ids([{"role": "user", "content": together}])
