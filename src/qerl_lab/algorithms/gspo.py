"""GSPO: GRPO with one ratio a completion, the geometric mean of its tokens' (arXiv 2507.18071, Eq. 5 to 7).

    J = 1/G sum_i min(s_i A_i, clip(s_i, 1 - e_low, 1 + e_high) A_i),   s_i = exp(1/|o_i| sum_t log r_it)

A completion is clipped as a whole. Since s_i is a mean of many tokens it stays close to 1: the option `algorithm=gspo`
sets the paper's clips, 3e-4 and 4e-4. On-policy, with one update per rollout, it is GRPO.

Departures from the paper:

1. The paper's sampler is pi_old. Here `rollout.importance_correction` weighs tokens or completions as in GRPO (4): a
   weight of tokens multiplies s_i by the mean of its tokens' weights. `in_ratio` has pi / pi_sampler in s_i.
2. The advantage is GRPO's (5).
3. A KL (beta above 0; the paper has none) must be the plain k3, as the ratio of a completion is none of a token.
4. With `algorithm.mask_truncated` a masked completion is a zero in the mean over completions.
"""

LOSS_TYPE = "grpo"
RATIO_OF = "sequence"
