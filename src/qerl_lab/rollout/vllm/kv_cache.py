"""Compute the size of the engine's key-value cache."""

import math

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB

BLOCK = 16  # tokens; vLLM allocates whole blocks
OWN_BLOCKS = 1  # blocks of the cache that vLLM takes for itself (`null_block` of its BlockPool)
SHARE = 0.5  # of the memory free beside the weights; the trainer needs the rest for activations and gradients


def kv_cache_bytes(cfg: RunConfig, per_token: int, free: int) -> int:
    """Choose the size of the key-value cache in bytes.

    It is rollout.vllm.kv_cache_gib if set, else enough for a full batch, but at most `SHARE` of `free`. `per_token` is
    the bytes of one token's keys and values, `free` the bytes of device memory left beside the engine's weights. Raises
    ConfigError if the longest prompt and completion allowed do not fit in the cache.
    """
    rollout = cfg.rollout
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    asked = rollout.vllm.kv_cache_gib
    if asked is None:
        at_once = min(rollout.batch_size, max(cfg.completions_per_gpu, cfg.eval.questions * cfg.eval.samples))
        blocks = longest // BLOCK + 1  # with room for one more token, so that no sequence waits for a block
        size = min((at_once * blocks + OWN_BLOCKS) * BLOCK * per_token, int(SHARE * free))
    else:
        size = int(asked * GIB)
    # vLLM 0.26 accepts a cache without its own block, and then waits forever for the last block of a completion.
    needed = (math.ceil(longest / BLOCK) + OWN_BLOCKS) * BLOCK * per_token
    if size < needed:
        source = f"half of the {free / GIB:.1f} GiB that are free"
        if asked is not None:
            source = f"rollout.vllm.kv_cache_gib={asked:g}"
        fewer_jobs = "a smaller jobs_per_gpu, " if cfg.jobs_per_gpu > 1 else ""  # only a part of the GPU counts as free
        raise ConfigError(
            f"The key-value cache would have {size / GIB:.2f} GiB ({source}), and one completion of "
            f"rollout.max_prompt_tokens + max_completion_tokens = {longest:,} tokens takes {needed / GIB:.2f}. "
            f"Type a lower rollout.max_completion_tokens, {fewer_jobs}a larger rollout.vllm.kv_cache_gib, or "
            "rollout.vllm.kv_cache_dtype=fp8."
        )
    return size
