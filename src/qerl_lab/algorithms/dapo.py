"""DAPO: GRPO with a token-level loss, clip-higher, no KL, and truncated completions left out (arXiv 2503.14476).

Departures from the DAPO paper:

1. Dynamic sampling is an option (`algorithm.dynamic_sampling`), off by default, as QeRL's released "DAPO" has none. It
   asks as many further questions as groups are missing, at most `algorithm.max_resamples` times; flat groups fill the
   rest with advantage zero. A group counts where any part of the task's reward differs, not the answer's alone.
2. Soft overlong punishment is an option (`algorithm.overlong_buffer_tokens`), off by default;
   `algorithm.mask_truncated=true` masks truncated completions instead, or besides.
3. A ratio between sampler and trainer corrects for noisy sampling (`rollout.importance_correction`).

The token-level mean runs over all completion tokens of a rollout that count, on all processes (each of several updates
divides by its equal share of them); the released code (TRL's `bnpo`) averages within each micro-batch instead.
"""

LOSS_TYPE = "dapo"
PARTS = {
    "dynamic_sampling": "algorithm.dynamic_sampling=true",
    "overlong_buffer_tokens": "algorithm.overlong_buffer_tokens=TOKENS",
}
