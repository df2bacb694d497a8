"""The norms that get noise. With float32 weights and no noise they leave the numbers of a model unchanged."""

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import AqnConfig, LoraConfig
from qerl_lab.model.dense import base_tensors
from qerl_lab.model.policy import fitting_norms, fitting_targets, hold_in_float32, noisy_norms

USUAL = AqnConfig().norms
BEFORE = ["input_layernorm", "pre_feedforward_layernorm"]  # in Gemma, which has norms after the layers too
IDS = torch.arange(12).view(2, 6)


def small(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a model of an architecture with two blocks, random weights, and norms that differ from 1."""
    config = AutoConfig.for_model(
        kind, vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape)
    return model.to(dtype)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_the_default_norms_feed_q_k_v_and_gate_up(kind: str) -> None:
    found = noisy_norms(small(kind), USUAL, "M")
    assert list(found) == [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in USUAL]


@pytest.mark.parametrize(("kind", "refused", "allowed"), [
    ("gemma2", USUAL, BEFORE), ("gemma3_text", USUAL, BEFORE),
    ("glm4", ["post_self_attn_layernorm"], USUAL),  # its post_attention_layernorm does feed gate and up
    ("qwen3", ["norm"], USUAL), ("qwen3", ["q_norm"], USUAL),
])  # fmt: skip
def test_norms_that_feed_no_linear_layer_are_refused_and_fitting_ones_are_named(
    kind: str, refused: list[str], allowed: list[str]
) -> None:
    model = small(kind)
    with pytest.raises(ConfigError, match=rf"\.{refused[-1]} feeds no linear.*Type aqn\.norms=\[{','.join(allowed)}\]"):
        noisy_norms(model, refused, "M")
    assert len(noisy_norms(model, allowed, "M")) == 4


def test_a_norm_with_a_bias_is_refused_in_bfloat16() -> None:
    """torch's LayerNorm takes no float32 weight with a bfloat16 input."""
    assert len(noisy_norms(small("starcoder2"), USUAL, "M")) == 4
    with pytest.raises(ConfigError, match=r"layers\.0\.input_layernorm .* has a bias .* Type model\.dtype=float32"):
        noisy_norms(small("starcoder2", torch.bfloat16), USUAL, "M")


@pytest.mark.parametrize(("kind", "fitting"), [
    ("qwen3", USUAL), ("gemma2", BEFORE), ("cohere", ["input_layernorm"]), ("olmo2", []), ("starcoder2", []),
])  # fmt: skip
def test_a_command_without_the_option_takes_the_norms_that_the_model_has(kind: str, fitting: list[str]) -> None:
    model = small(kind, torch.bfloat16)
    assert fitting_norms(model, USUAL) == fitting
    assert len(noisy_norms(model, fitting, "M")) == 2 * len(fitting)


def test_a_name_that_also_fits_a_norm_before_no_linear_layer_is_not_proposed() -> None:
    """In OPT `final_layer_norm` is a norm before fc1 in each block, and the model's last norm."""
    model = small("opt")
    assert fitting_norms(model, USUAL) == fitting_norms(model, ["final_layer_norm"]) == ["self_attn_layer_norm"]
    with pytest.raises(ConfigError, match=r"Type aqn\.norms=\[self_attn_layer_norm\]\.$"):
        noisy_norms(model, ["final_layer_norm"], "M")
    assert len(noisy_norms(model, ["self_attn_layer_norm"], "M")) == 2


def test_to_a_model_without_a_norm_before_a_linear_no_noise_is_proposed() -> None:
    with pytest.raises(ConfigError, match=r"allowed: none of this model\. Type aqn=off aqn\.norms=\[\]\.$"):
        noisy_norms(small("olmo2"), ["q_norm"], "M")
    assert noisy_norms(small("olmo2"), [], "M") == {}


def test_a_command_without_the_option_adapts_linears_that_the_model_has() -> None:
    usual = LoraConfig().target_modules
    assert fitting_targets(small("qwen2"), usual, "M") == usual
    assert fitting_targets(small("gpt_neox"), usual, "M") == [
        "dense", "dense_4h_to_h", "dense_h_to_4h", "query_key_value",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"model\.path=M has no torch\.nn\.Linear"):
        fitting_targets(small("gpt2"), usual, "M")


def logits_and_gradient(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return logits, and the gradient of the embeddings, which goes through every norm."""
    model.zero_grad()
    logits = model(IDS).logits
    logits.float().log_softmax(-1)[..., 3].sum().backward()
    return logits.detach(), model.get_input_embeddings().weight.grad.clone()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "gemma2"])
def test_float32_norms_without_noise_give_the_bits_of_bfloat16_norms(kind: str) -> None:
    model = small(kind, torch.bfloat16)
    before = logits_and_gradient(model)
    norms = noisy_norms(model, BEFORE if kind == "gemma2" else USUAL, "M")
    weights = [hold_in_float32(norm) for norm in norms.values()]
    assert {weight.dtype for weight in weights} == {torch.float32}
    for one, other in zip(before, logits_and_gradient(model), strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        assert torch.equal(one, other)


def test_a_policy_in_bfloat16_is_written_with_norms_in_bfloat16(tiny, build_policy) -> None:
    """The norms have the dtype of the files again. An engine and an export take these tensors."""
    policy = build_policy(tiny(model__dtype="bfloat16"))
    written = base_tensors(policy)
    assert {weight.dtype for name, weight in written.items() if "norm" in name} == {torch.bfloat16}
    assert policy.clean_norms
    for name, clean in policy.clean_norms.items():
        assert torch.equal(written[f"{name}.weight"].float(), clean)
