"""Speeds printed in the QeRL paper (arXiv 2510.11696 v1), for tables beside ours."""

# Rollout tokens per second by model, weight format and LoRA rank: one H100 of 80 GB, vLLM, batch 1, prompt 256, 2,048
# new tokens. BF16 and NVFP4 from Table 9 (which repeats the batch of 2 of Tables 5 to 8), NF4 (QLoRA) from Figure 11.
TOKENS_BY_RANK: dict[str, dict[str, dict[int, float]]] = {
    "qwen2.5-3b": {
        "bf16": {16: 151.2, 32: 148.8, 64: 138.6},
        "nvfp4": {16: 157.0, 32: 153.1, 64: 140.0},
    },
    "qwen2.5-7b": {
        "bf16": {16: 115.4, 32: 113.2, 64: 108.3},
        "nvfp4": {16: 151.6, 32: 149.9, 64: 137.7},
    },
    "qwen2.5-14b": {
        "bf16": {16: 65.4, 32: 63.1, 64: 61.2},
        "nvfp4": {16: 95.3, 32: 92.9, 64: 86.0},
        "nf4": {16: 45.1, 32: 44.2, 64: 42.8},
    },
    "qwen2.5-32b": {
        "bf16": {16: 34.0, 32: 33.3, 64: 31.9},
        "nvfp4": {16: 58.0, 32: 56.0, 64: 51.3},
        "nf4": {16: 25.2, 32: 25.6, 64: 23.0},
    },
}

# Seconds per step with NVFP4 by model and batch size (Table 8): one H100 of 80 GB, gradient checkpointing, prompt 256,
# completions of at most 2,048 tokens. We take the batch size to count completions, as the paper does not say.
STEP_SECONDS: dict[str, dict[int, float]] = {"qwen2.5-32b": {2: 10.6, 8: 12.2}}
STEP_NEW = 2048


def ratio_by_rank(model: str, over: str) -> dict[int, float]:
    """Return the paper's NVFP4 speed over its `over` (bf16 or nf4) by rank; empty if it printed none."""
    printed = TOKENS_BY_RANK.get(model, {})
    return {rank: printed["nvfp4"][rank] / tokens for rank, tokens in printed.get(over, {}).items()}
