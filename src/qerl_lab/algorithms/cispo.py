"""CISPO: REINFORCE weighted by the clipped ratio, so that no token loses its gradient.

Source: MiniMax-M1, arXiv 2506.13585, Eq. 4 and 5.

    J = 1 / (sum_i |o_i|) sum_i sum_t sg(min(r_it, 1 + e_high)) A_i log pi(o_it)

sg stops the gradient. A token above the bound still learns, with the bound as its weight. There is no lower bound
(`algorithm.epsilon_low=1`), as in the paper. The paper tunes the upper bound and does not print it; the option
`algorithm=cispo` takes ScaleRL's (arXiv 2510.13786), min(r, 5), so e_high is 4.

Departures from the paper:

1. The paper samples from pi_old. `rollout.importance_correction=in_ratio` is its formula with this lab's noisy sampler.
   The other corrections multiply a token's weight by pi_old / pi_sampler, truncated separately.
2. The mean runs over the tokens of all questions, as in DAPO (3). The advantage is GRPO's (5).
3. A KL is added to a token's loss, not multiplied by the weight.
"""

LOSS_TYPE = "cispo"
RATIO_OF = "token"
