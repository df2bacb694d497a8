"""Models that compute the padding of a prompt into their state are refused; others may be recurrent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    RecurrentGemmaConfig,
    RwkvConfig,
)

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy
from small_checkpoints import write_dense

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "eos_token_id": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
RWKV = RwkvConfig(**SIZES, attention_hidden_size=64)
GEMMA = RecurrentGemmaConfig(**SIZES, **HEADS, lru_width=64, attention_window_size=16)
QWEN = Qwen3_5TextConfig(
    **SIZES, **HEADS, layer_types=["linear_attention", "linear_attention", "full_attention"],
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip


def build(config: PreTrainedConfig, tiny: Callable[..., RunConfig], folder: Path) -> policy.Policy:
    """Build the policy of a random model of `config`, which lies in `folder`."""
    torch.manual_seed(0)
    write_dense(folder, AutoModelForCausalLM.from_config(config))
    cfg = tiny(model__path=str(folder), model__attention="eager", format__name="bf16")
    return policy.build(cfg, torch.device("cpu"), fits_names=True)


@pytest.mark.parametrize("config", [RWKV, GEMMA], ids=lambda config: config.model_type)
def test_a_model_that_reads_padding_is_refused(
    config: PreTrainedConfig, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="the padding before a prompt changes the log-probs"):
        build(config, tiny, tmp_path)


def test_a_recurrent_model_that_masks_padding_is_taken(tiny: Callable[..., RunConfig], tmp_path: Path) -> None:
    assert build(QWEN, tiny, tmp_path).base._is_stateful
