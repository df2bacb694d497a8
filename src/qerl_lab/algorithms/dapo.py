"""DAPO: GRPO with a token-level loss, clip-higher, no KL, and truncated completions left out.

Departures from the DAPO paper:

1. Dynamic sampling is missing: groups whose rewards are all equal stay in the batch with advantage zero
   (`reward/zero_variance_groups` says how many). QeRL's released "DAPO" lacks it too.
2. Soft overlong punishment is missing; `algorithm.mask_truncated=true` masks truncated completions instead.
3. A ratio between sampler and trainer corrects for noisy sampling (`rollout.importance_correction`).

The token-level mean runs over all completion tokens of a rollout that count, on all processes (each of several updates
divides by its equal share of them); the released code (TRL's `bnpo`) averages within each micro-batch instead.
"""

LOSS_TYPE = "dapo"
LACKS = (
    "algorithm=dapo has the token-level loss, clip-higher and truncation masking; "
    "dynamic sampling and overlong shaping are not in it yet."
)
