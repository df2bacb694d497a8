"""KL between models, or of noise, over the whole vocabulary, in nats per token (_T), `CHUNK` tokens at a time."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

CHUNK = 1024  # most tokens with float32 logits in memory at once

Pairs = list[tuple[list[int], list[int]]]  # token ids per text: context, and the tokens to compare


def per_token(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) at each token in nats, float64 [T], from log-probs [T, vocabulary]. Terms with p = 0 are 0."""
    return (p.exp() * (p - q).masked_fill_(p.isneginf(), 0.0)).sum(-1, dtype=torch.float64)


def entropy_per_token(p: Tensor) -> Tensor:
    """Return the entropy at each token in nats, float64 [T], from log-probs [T, vocabulary]."""
    return -(p.exp() * p.masked_fill(p.isneginf(), 0.0)).sum(-1, dtype=torch.float64)


def split_by_entropy(entropies_T: Tensor) -> tuple[float, float]:
    """Return the mean entropy of the forking tokens and of the rest, in the unit of `entropies_T`.

    Forking tokens are the fifth of the tokens, rounded up, with the highest entropy (arXiv 2506.01939). The rest is NaN
    if there is one token.
    """
    ranked = entropies_T.double().sort(descending=True).values
    count = math.ceil(len(ranked) / 5)
    return ranked[:count].mean().item(), ranked[count:].mean().item()


def mean_and_error(values_T: Tensor, lengths: list[int]) -> tuple[float, float]:
    """Return the mean over tokens, and its standard error as a ratio estimator over texts. Needs two texts or more.

    Texts are the unit, because tokens of one text are correlated. `values_T` holds the values of all texts, one text
    after another; `lengths` gives the number of tokens of each text.
    """
    values_T, texts = values_T.double(), len(lengths)
    assert texts > 1, "two texts at least"
    average = values_T.mean().item()
    residuals = torch.stack([(text - average).sum() for text in values_T.split(lengths)])
    variance = residuals.square().sum().item() * texts / (texts - 1)
    return average, math.sqrt(variance) / len(values_T)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, pairs: Pairs, batch_size: int | None = None) -> Tensor:
    """Return the hidden states from which `model` predicts each compared token, text by text: [T, hidden].

    Each forward pass takes `batch_size` texts (all by default), padded on the right.
    """
    size, states_of_batches = batch_size or len(pairs), []
    for batch in (pairs[begin : begin + size] for begin in range(0, len(pairs), size)):
        texts = [torch.tensor(given + compared) for given, compared in batch]
        ids = pad_sequence(texts, batch_first=True).to(model.device)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(model.device)
        states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        spans = [slice(len(given) - 1, len(given) + len(compared) - 1) for given, compared in batch]
        states_of_batches.append(torch.cat([row[span] for row, span in zip(states, spans, strict=True)]))
    return torch.cat(states_of_batches)


def logprobs(model: PreTrainedModel, states: Tensor, temperature: float = 1.0) -> Iterator[Tensor]:
    """Yield float32 log-probs [at most CHUNK, vocabulary] of `model` at `temperature`, from its `hidden_states`.

    The model's own forward computes the logits, because some models scale them after the output layer (Granite) or cap
    them (Gemma 2). For this the backbone runs once, on a dummy token; in later calls of forward it only returns this
    output, with a chunk of `states` in it.
    """
    backbone = model.get_decoder()  # OPT's forward calls the decoder inside its base_model
    token = torch.zeros(1, 1, dtype=torch.long, device=states.device)
    with torch.no_grad():
        output = backbone(input_ids=token, use_cache=False)
    for chunk in states.split(CHUNK):
        output.last_hidden_state = chunk.unsqueeze(1)
        backbone.forward = lambda *_, **__: output  # GPT-NeoX passes the token by position
        try:
            with torch.no_grad():
                logits = model(input_ids=token, use_cache=False).logits.squeeze(1)
        finally:
            del backbone.forward  # restores the method of its class
        yield (logits.float() / temperature).log_softmax(-1)
