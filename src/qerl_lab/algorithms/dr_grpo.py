"""Dr. GRPO: GRPO without dividing by the completion's length or the group's standard deviation (arXiv 2503.20783).

    J = 1/G sum_i 1/L sum_t min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i),   A_i = R_i - mean R

L is rollout.max_completion_tokens for every completion. So long wrong answers are not punished less, and easy and hard
questions weigh the same. The option `algorithm=dr_grpo` is this file with `algorithm.normalize_std=false`.

Departures from the paper:

1. The paper's equation has no L. Its code and TRL divide by the longest completion allowed. With Adam a constant factor
   matters only to gradient clipping and beside a KL or an entropy bonus.
2. Clip-higher and the correction for noisy sampling are as in GRPO (3, 4).
3. With `algorithm.mask_truncated` a masked completion adds zero to the sum, and the divisor stays.
"""

LOSS_TYPE = "dr_grpo"
RATIO_OF = "token"
