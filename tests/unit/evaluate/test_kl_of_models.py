"""Log-probs from hidden states equal those of an ordinary forward pass, in bounded memory."""

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from packed_layers import tiny_model
from qerl_lab.evaluate import kl

SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
NEOX = {name: value for name, value in SHAPE.items() if name != "num_key_value_heads"}
OPT = {"vocab_size": 512, "hidden_size": 64, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "llama": tiny_model,
    "granite divides": lambda: GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.25)),
    "gemma 2 caps": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=0.5)),
    "gpt-neox calls its backbone by position": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX)),
    "opt calls the decoder in its backbone": lambda: OPTForCausalLM(
        OPTConfig(**OPT, word_embed_proj_dim=64, init_std=0.2)
    ),
}
PAIRS = [([5], [7, 9, 11]), ([3, 4, 5, 6, 7, 8], [2]), ([9, 8], [1, 2, 3, 4, 5])]


def forward(model: PreTrainedModel, temperature: float) -> Tensor:
    """Return log-probs [tokens, vocabulary], one text at a time, without padding, from all logits."""
    found = []
    for given, compared in PAIRS:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([given + compared])).logits[0]
        found.append((logits[len(given) - 1 : -1].double() / temperature).log_softmax(-1))
    return torch.cat(found)


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_those_of_a_forward_pass(name: str) -> None:
    """Prompts have one token or unequal lengths, and some models change the logits after the output layer."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    (found,) = kl.logprobs(model, kl.hidden_states(model, PAIRS), 0.8)
    assert found.dtype == torch.float32
    assert (found - forward(model, 0.8)).abs().max() < 1e-4
    assert (found - forward(model, 1.0)).abs().max() > 1e-3


def test_only_the_logits_of_a_chunk_are_in_memory_and_the_layers_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, layers_ran = tiny_model().eval(), [], []
    states = kl.hidden_states(model, PAIRS)
    (whole,) = kl.logprobs(model, states)
    monkeypatch.setattr(kl, "CHUNK", 4)
    with (
        model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(len(args[0]))),
        model.base_model.layers[0].register_forward_hook(lambda *_: layers_ran.append(1)),
    ):
        torch.testing.assert_close(torch.cat(list(kl.logprobs(model, states))), whole)
    assert seen == [4, 4, 1]
    assert len(layers_ran) == 1
    kl.hidden_states(model, PAIRS)  # the backbone computes again
    assert "forward" not in vars(model.base_model)
