"""GSPO: GRPO with one ratio per completion, the geometric mean of its token ratios (arXiv 2507.18071, Eq. 5 to 7).

    J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i),   s_i = exp(1/|o_i| sum_t log r_it)

A completion is clipped as a whole. s_i averages many tokens and so stays close to 1: the option `algorithm=gspo` sets
the paper's clips, 3e-4 and 4e-4. With one update per rollout (on-policy) it equals GRPO.

Departures from the paper:

1. The paper samples from pi_old. Here `rollout.importance_correction` weighs tokens or completions as in GRPO (4);
   token weights multiply s_i by their mean. With `in_ratio` s_i holds pi / pi_sampler.
2. The advantage is GRPO's (5).
3. A KL (beta above 0; the paper has none) must be the plain k3, because a completion's ratio is no token's ratio.
4. With `algorithm.mask_truncated` a masked completion counts as zero in the mean over completions.
"""

LOSS_TYPE = "grpo"
RATIO_OF = "sequence"
