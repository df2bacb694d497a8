"""KL between two models over the whole vocabulary, in nats per token, with the logits of `CHUNK` tokens at a time."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

CHUNK = 1024  # tokens whose float32 logits are in memory at once

Pairs = list[tuple[list[int], list[int]]]  # token ids of a text: what is given, and the tokens that are compared


@dataclass(frozen=True)
class Estimate:
    """Mean over tokens, in nats. The standard error is over texts, since tokens of a text depend on each other; None
    for a single text."""

    nats: float
    standard_error: float | None


def measure(p: Iterable[Tensor], q: Iterable[Tensor], lengths: list[int]) -> Estimate:
    """Estimate KL(p || q) from log-probs of the same tokens, in chunks [T, vocabulary]; `lengths` are the texts'."""
    return mean(torch.cat([per_token(*chunk).cpu() for chunk in zip(p, q, strict=True)]), lengths)


def per_token(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each token in nats: float64 [T], from log-probs [T, vocabulary]; where p = 0 a term is 0."""
    return (p.exp() * (p - q).masked_fill_(p.isneginf(), 0.0)).sum(-1, dtype=torch.float64)


def entropy_per_token(p: Tensor) -> Tensor:
    """Entropy of each token in nats: float64 [T], from log-probs [T, vocabulary]."""
    return -(p.exp() * p.masked_fill(p.isneginf(), 0.0)).sum(-1, dtype=torch.float64)


def mean(values_T: Tensor, lengths: list[int]) -> Estimate:
    """Mean of `values_T` with the standard error of a ratio estimator: texts are drawn, of `lengths` tokens each."""
    values_T, texts = values_T.double(), len(lengths)
    average = values_T.mean().item()
    if texts < 2:
        return Estimate(average, None)
    residuals = torch.stack([(text - average).sum() for text in values_T.split(lengths)])
    variance = residuals.square().sum().item() * texts / (texts - 1)
    return Estimate(average, math.sqrt(variance) / len(values_T))


@torch.no_grad()
def hidden_states(model: PreTrainedModel, pairs: Pairs) -> Tensor:
    """Hidden states from which `model` predicts each compared token, text after text: [T, hidden].

    Runs one forward pass, padded on the right.
    """
    texts = [torch.tensor(given + compared) for given, compared in pairs]
    ids = pad_sequence(texts, batch_first=True).to(model.device)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(model.device)
    states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    spans = [slice(len(given) - 1, len(given) + len(compared) - 1) for given, compared in pairs]
    return torch.cat([row[span] for row, span in zip(states, spans, strict=True)])


def logprobs(model: PreTrainedModel, states: Tensor, temperature: float = 1.0) -> Iterator[Tensor]:
    """Yield the log-probs [at most CHUNK, vocabulary] in float32 that `model` makes of `hidden_states`.

    The model's own forward makes the logits, because some scale them after the output layer (Granite) or cap them
    (Gemma 2). It runs on one token, and a hook puts `states` where its backbone's output was.
    """
    token = torch.zeros(1, 1, dtype=torch.long, device=states.device)
    for chunk in states.split(CHUNK):

        def put_states(_module: nn.Module, _args: Any, output: Any, chunk: Tensor = chunk) -> Any:
            output.last_hidden_state = chunk.unsqueeze(1)
            return output

        with torch.no_grad(), model.base_model.register_forward_hook(put_states):
            logits = model(input_ids=token, use_cache=False).logits.squeeze(1)
        yield (logits.float() / temperature).log_softmax(-1)
