"""Train on micro-batches without padding: concatenate the sequences in one row and mask attention between them.

A padded batch computes every row to the length of the longest. Packing uses transformers' `AttentionInterface`, the
arguments `cu_seq_lens_q` and `max_length_q` that its models pass on to attention, and torch's `varlen_attn`
(FlashAttention-2).
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig

NAME = "qerl_lab_packed"


def forward_packed(
    model: Callable[..., Any], *, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs: Any
) -> SimpleNamespace:
    """Compute a padded batch by `model` as one row without padding. Call it inside `packed_attention`.

    `model` must return `log_probs` and `entropy` of the labels, as TRL's output head does; `kwargs` are its further
    arguments. Takes and returns padded tensors [B, T]; the results are 0 at padding.
    """
    is_token = attention_mask.bool()
    lengths = is_token.sum(1)
    out = model(
        input_ids=input_ids[is_token][None],
        position_ids=(is_token.cumsum(1) - 1)[is_token][None],
        labels=labels[is_token][None],
        attention_mask=None,
        cu_seq_lens_q=F.pad(lengths.cumsum(0), (1, 0)).int(),
        max_length_q=int(lengths.max()),
        use_cache=False,
        **kwargs,
    )
    return SimpleNamespace(log_probs=_unpack(out.log_probs, is_token), entropy=_unpack(out.entropy, is_token))


def forward_padded(model: Callable[..., Any], *, attention_mask: Tensor, **kwargs: Any) -> Any:
    """Compute a padded batch by `model`; a token's position is its index among the tokens, as in `generate`.

    Without `position_ids` models with learned positions, such as GPTBigCode, count the padding before a prompt too.
    `kwargs` are the model's further arguments. Returns its result.
    """
    position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return model(attention_mask=attention_mask, position_ids=position_ids, **kwargs)


def _unpack(row: Tensor, is_token: Tensor) -> Tensor:
    """Scatter a packed `row` [1, tokens - 1] to a padded batch [B, T]; `is_token` [B, T] is false at padding.

    The row has no value for the first token of the batch, which gets 0.
    """
    return row.new_zeros(is_token.shape).masked_scatter(is_token, F.pad(row, (1, 0)))


@contextmanager
def packed_attention(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: let the model use packed attention. Keep it open until the backward pass ends."""
    before = model.config._attn_implementation  # transformers has a public setter and no getter
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def should_pack(cfg: RunConfig, model: PreTrainedModel) -> bool:
    """Return whether the run packs sequences. Raises ConfigError if optim.packing=on is impossible.

    With optim.packing=auto a run packs on a GPU with model.attention=sdpa, if the model allows packing.
    """
    by_itself = cfg.model.attention == "sdpa" and model.device.type == "cuda"
    if not (cfg.optim.packing == "on" or (cfg.optim.packing == "auto" and by_itself)):
        return False
    allowed = is_packable(model)
    if cfg.optim.packing == "on" and not allowed:
        raise ConfigError(
            f"optim.packing=on is not possible for {cfg.model.path}; allowed: models in which every layer attends to "
            "all earlier tokens, without dropout, capped logits, or attention of its own. Type optim.packing=off."
        )
    return allowed


def is_packable(model: PreTrainedModel) -> bool:
    """Return whether `attend` can replace the model's attention: every layer is causal over all earlier tokens.

    Dropout, capped logits and a fixed attention implementation exclude it, and so do layers that do not pass the
    sequence lengths on to the attention (StableLM, Nemotron).
    """
    config = model.config.get_text_config()
    if layer_types := getattr(config, "layer_types", None):
        attends_to_all = set(layer_types) == {"full_attention"}
    else:
        attends_to_all = getattr(config, "sliding_window", None) is None
    is_plain = not any(getattr(config, name, None) for name in ("attn_logit_softcapping", "attention_dropout"))
    takes_interface = model._can_set_attn_implementation()  # an AttentionInterface
    return attends_to_all and is_plain and takes_interface and _passes_lengths(model)


@torch.no_grad()
def _passes_lengths(model: PreTrainedModel) -> bool:
    """Run one token through `model`; return whether its layers pass the lengths of the sequences on to `attend`."""
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=model.device)
    try:
        with packed_attention(model):
            model(input_ids=token, position_ids=token, cu_seq_lens_q=starts, max_length_q=1, use_cache=False)
    except TypeError as error:
        if "cu_seq_lens_q" not in str(error):
            raise
        return False  # `attend` was called without them
    return True


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float,
    cu_seq_lens_q: Tensor, max_length_q: int, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Compute causal attention within each packed sequence, without dropout. transformers calls it by `NAME`.

    Args:
        query: [1, heads, tokens, dim]; key and value are [1, key-value heads, tokens, dim].
        cu_seq_lens_q: index of each sequence's first token, then the number of all tokens; int32 [sequences + 1].
        max_length_q: number of tokens of the longest sequence.

    Returns the output [1, tokens, heads, dim], and None in place of attention weights.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [tokens, heads, dim]
        shared: dict[str, Any] = {}
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            shared["enable_gqa"] = True
        else:  # torch before 2.12
            copies = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        starts, longest = cu_seq_lens_q, max_length_q
        out = varlen_attn(
            query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), **shared
        )
        return cast(Tensor, out)[None], None  # a pair only with return_aux
    sizes = cu_seq_lens_q.diff().tolist()
    parts = zip(*(tensor.split(sizes, dim=2) for tensor in (query, key, value)), strict=True)
    outs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in parts
    ]
    return torch.cat(outs, dim=2).transpose(1, 2), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # cu_seq_lens_q replaces the mask
