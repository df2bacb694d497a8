"""Packed and padded micro-batches give the same log-probs, entropies and gradients."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)
from trl.trainer.utils import add_fused_lm_head

from packed_layers import tiny_model
from qerl_lab.config.option import ConfigError
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.train import packing
from trained import train

LENGTHS = [(3, 9), (7, 1), (1, 5), (5, 6)]  # of prompt and completion
PROMPT, COMPLETION = 7, 9
IGNORED = -100  # the label of a token that is not scored, as TRL has it


def padded() -> tuple[Tensor, Tensor, Tensor]:
    """Prompts padded on the left, completions on the right, as TRL pads them: ids, mask, labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(LENGTHS), PROMPT + COMPLETION, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, completion) in enumerate(LENGTHS):
        span = slice(PROMPT - prompt, PROMPT + completion)
        ids[row, span] = torch.randint(1, 32, (prompt + completion,), generator=generator)
        mask[row, span] = 1
    labels = ids.masked_fill(mask == 0, IGNORED)
    labels[:, :PROMPT] = IGNORED
    return ids, mask, labels


def qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, initializer_range=0.2,
    ))  # fmt: skip


def learner(make, checkpointing: bool):
    model = make().eval()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    torch.manual_seed(1)
    peft = get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )
    if checkpointing:
        peft.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return peft


def scored(model, packed: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probs and entropies of the completions, 0 in the padding, and the gradients of a weighted sum of both."""
    ids, mask, labels = padded()
    call = partial(packing.forward_packed, model) if packed else model
    with packing.packed_attention(model.get_base_model()) if packed else torch.enable_grad():
        out = call(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        held = mask[:, PROMPT:]
        logps, entropies = (value[:, -COMPLETION:] * held for value in (out.log_probs, out.entropy))
        weights = torch.linspace(-1, 1, COMPLETION)
        (logps * weights).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return logps.detach(), entropies.detach(), gradients


def test_each_text_begins_at_position_0() -> None:
    """Log-probs would not show a wrong start, because rotary embeddings are relative."""
    model, seen = learner(tiny_model, checkpointing=False), list[dict]()
    base = model.get_base_model()
    base.register_forward_pre_hook(lambda _, args, named: seen.append(named), with_kwargs=True)
    scored(model, packed=True)
    assert seen[0]["position_ids"].tolist() == [[place for lengths in LENGTHS for place in range(sum(lengths))]]
    assert seen[0]["max_length_q"] == max(map(sum, LENGTHS))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("make", [tiny_model, qwen3], ids=["qwen2", "qwen3"])
def test_it_gives_what_the_padded_batch_gives(make, checkpointing: bool) -> None:
    expected = scored(learner(make, checkpointing), packed=False)
    found = scored(learner(make, checkpointing), packed=True)
    assert found[0].abs().sum() > 10
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    assert max(gradient.abs().max() for gradient in expected[2]) > 0.1
    torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("device", "dtype", "atol"), [
    ("cpu", torch.float32, 1e-5), pytest.param("cuda", torch.bfloat16, 4e-2, marks=pytest.mark.gpu),
])  # fmt: skip
def test_attention_of_a_row_is_that_of_each_sequence(device: str, dtype: torch.dtype, atol: float) -> None:
    """FlashAttention over the whole row on a GPU, against float32 attention to each sequence alone."""
    lengths, heads, shared, dim = [5, 130, 1, 64], 6, 2, 64
    torch.manual_seed(0)
    row = [torch.randn(1, count, sum(lengths), dim).to(dtype) for count in (heads, shared, shared)]
    query, key, value = (tensor.to(device).requires_grad_() for tensor in row)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    out, _ = packing.attend(
        torch.nn.Module(), query, key, value, None, scaling=0.1, cu_seq_lens_q=starts, max_length_q=max(lengths)
    )
    weights = torch.randn(out.shape)
    (out * weights.to(out)).sum().backward()
    alone = [tensor.float().requires_grad_() for tensor in row]
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in alone), strict=True)
    how = {"is_causal": True, "enable_gqa": True, "scale": 0.1}
    expected = torch.cat([F.scaled_dot_product_attention(*part, **how) for part in parts], 2)
    (expected.transpose(1, 2) * weights).sum().backward()
    torch.testing.assert_close(out.float().cpu(), expected.transpose(1, 2), rtol=0, atol=atol)
    for found, wanted in zip((query, key, value), alone, strict=True):
        assert (found.grad.float().cpu() - wanted.grad).norm() < max(atol, 1e-4) * wanted.grad.norm()


def test_only_tokens_are_computed() -> None:
    model, seen = learner(tiny_model, False), []
    model.get_base_model().model.layers[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    scored(model, packed=True)
    assert seen == [(1, sum(map(sum, LENGTHS)), 64)]


@pytest.mark.parametrize(("device", "changes", "packs"), [
    ("cpu", {"optim__packing": "auto"}, False), ("cpu", {"optim__packing": "on"}, True),
    ("cuda", {"model__attention": "sdpa"}, True), ("cuda", {"model__attention": "eager"}, False),
])  # fmt: skip
def test_a_gpu_packs_by_itself_where_it_keeps_the_attention(
    device: str, changes: dict, packs: bool, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_passes_lengths", lambda _: True)  # the model below computes nothing
    model = SimpleNamespace(device=torch.device(device), config=tiny_model().config)
    model._can_set_attn_implementation = lambda: True
    assert packing.should_pack(tiny(**changes), model) is packs


def sliding():
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return MistralForCausalLM(MistralConfig(**shape, sliding_window=8))


def dropping():
    model = tiny_model()
    model.config.attention_dropout = 0.1
    return model


def mixed():
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    return model


def capped():
    model = tiny_model()
    model.config.attn_logit_softcapping = 50.0
    return model


def with_layers_that_keep_the_lengths():
    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
             "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
    return StableLmForCausalLM(StableLmConfig(**shape))


def with_attention_of_its_own():
    """transformers would only warn, and the sequences of a row would attend to each other."""
    return BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=64, n_layer=1, n_head=2, attention_dropout=0.0))


@pytest.mark.parametrize("make", [
    sliding, mixed, capped, dropping, with_layers_that_keep_the_lengths, with_attention_of_its_own,
])  # fmt: skip
def test_a_model_that_cannot_be_packed_is_refused_when_the_run_begins(make, tiny) -> None:
    assert packing.is_packable(tiny_model())
    with pytest.raises(ConfigError, match=r"optim\.packing=on is not possible for pocket.*Type optim"):
        packing.should_pack(tiny(optim__packing="on"), make())


@pytest.mark.parametrize("changes", [
    {"algorithm__beta": 0.1, "aqn__schedule": "linear", "aqn__scope": "rollout_and_train", "aqn__reading": "equation"},
    {"algorithm__name": "gspo", "algorithm__entropy_coef": 0.1, "algorithm__mask_truncated": True,
     "rollout__importance_correction": "in_ratio"},
], ids=["kl and noise", "gspo and a bonus"])  # fmt: skip
def test_a_step_without_padding_is_the_step(changes: dict, tiny, build_policy, tmp_path: Path) -> None:
    """Sampled by the same engine, whose attention is the model's own."""
    found = []
    for packing_is in ("off", "on"):
        cfg = tiny(steps=2, optim__packing=packing_is, rollout__max_completion_tokens=40, rollout__prompts_per_step=2,
                   **changes)  # fmt: skip
        policy = build_policy(cfg)
        found.append(train(cfg, policy, TransformersEngine(policy, 64), tmp_path / packing_is))
        assert policy.model.config._attn_implementation == "sdpa"
    padded, packed = found
    assert padded.scored == packed.scored * 4  # of a micro-batch one row
    for expected, gradients in zip(padded.gradients, packed.gradients, strict=True):
        largest = max(gradient.abs().max() for gradient in expected.values())
        assert largest > 1e-5
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-4 * float(largest))
    for expected, metrics in zip(padded.steps, packed.steps, strict=True):
        names = [name for name in expected if name.startswith(("policy/", "sampler/", "reward/"))]
        assert {name: metrics[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-4, abs=1e-5
        )
