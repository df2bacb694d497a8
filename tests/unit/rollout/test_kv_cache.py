"""The size of vLLM's key-value cache."""

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.model.on_disk import cache_bytes_per_token
from qerl_lab.rollout.vllm.kv_cache import kv_cache_bytes

QWEN_7B = {"num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("config", "element_bytes", "expected"),
    [
        (QWEN_7B, 1, 2 * 28 * 4 * 128),
        (QWEN_7B | {"head_dim": 64}, 2, 2 * 28 * 4 * 64 * 2),
        ({**QWEN_7B, "num_key_value_heads": None}, 2, 2 * 28 * 28 * 128 * 2),
    ],
)
def test_a_token_takes_keys_and_values_in_every_layer(config: dict, element_bytes: int, expected: int) -> None:
    assert cache_bytes_per_token(config, element_bytes) == expected


def settings(tiny, **changes):
    return tiny(rollout__max_prompt_tokens=256, rollout__max_completion_tokens=768, rollout__group_size=8,
                rollout__prompts_per_step=8, **changes)  # fmt: skip


def test_the_cache_holds_a_full_batch(tiny) -> None:
    """The cache has blocks of 16 tokens, room for a token after the longest completion, and a block for vLLM itself."""
    assert kv_cache_bytes(settings(tiny, eval__questions=0), 1000, 100 * GIB) == (64 * 1040 + 16) * 1000
    asked = settings(tiny, eval__questions=100, eval__samples=4, rollout__batch_size=200)
    assert kv_cache_bytes(asked, 1000, 100 * GIB) == (200 * 1040 + 16) * 1000


def test_the_cache_takes_at_most_half_of_the_memory_unless_its_size_is_typed(tiny) -> None:
    assert kv_cache_bytes(settings(tiny), 10**6, 10 * GIB) == 5 * GIB
    assert kv_cache_bytes(settings(tiny, rollout__vllm__kv_cache_gib=1.5), 1000, GIB) == int(1.5 * GIB)


@pytest.mark.parametrize(
    ("changes", "who"), [({}, "half of the 1.0"), ({"rollout__vllm__kv_cache_gib": 0.5}, "kv_cache_gib")]
)
def test_a_cache_too_small_for_one_completion_is_refused(changes: dict, who: str, tiny) -> None:
    with pytest.raises(ConfigError, match=who) as raised:
        kv_cache_bytes(settings(tiny, **changes), 10**6, GIB)
    assert "1,024 tokens takes 0.97" in str(raised.value)
    assert "Type a lower rollout.max_completion_tokens, a larger" in str(raised.value)
    with pytest.raises(
        ConfigError, match=r"Type a lower rollout\.max_completion_tokens, a smaller jobs_per_gpu, a larger"
    ):
        kv_cache_bytes(settings(tiny, jobs_per_gpu=2, **changes), 10**6, GIB)


def test_a_cache_without_the_block_for_vllm_itself_is_refused(tiny) -> None:
    """One completion of 1,024 tokens takes 64 blocks, and vLLM would wait for the last of them forever."""
    enough = 65 * 16 * 2**20 / GIB
    assert kv_cache_bytes(settings(tiny, rollout__vllm__kv_cache_gib=enough), 2**20, GIB) == 65 * 16 * 2**20
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        kv_cache_bytes(settings(tiny, rollout__vllm__kv_cache_gib=64 * enough / 65), 2**20, GIB)
    longer = settings(tiny, rollout__vllm__kv_cache_gib=enough)
    longer.rollout.max_completion_tokens += 1  # needs another block
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        kv_cache_bytes(longer, 2**20, GIB)
