"""Dr. GRPO: GRPO without its two divisions, by a completion's length and by the group's spread (arXiv 2503.20783).

    J = 1/G sum_i 1/L sum_t min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i),   A_i = R_i - mean R

where L is rollout.max_completion_tokens, the same for every completion: so neither are long wrong answers punished
less, nor easy and hard questions weighted more. The option `algorithm=dr_grpo` is this file and
`algorithm.normalize_std=false`.

Departures from the paper:

1. Its equation divides by no L; its code does, by the longest completion allowed, and so does TRL. With Adam a constant
   factor matters only to the clipping of gradients, beside a KL or an entropy bonus.
2. Clip-higher, and the correction for noisy sampling, as in GRPO (3, 4).
3. With `algorithm.mask_truncated` a masked completion adds zero to the sum, and the divisor stays.
"""

LOSS_TYPE = "dr_grpo"
RATIO_OF = "token"
