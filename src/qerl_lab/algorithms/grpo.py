"""GRPO: advantages within a group and a clipped loss, averaged over completions (arXiv 2402.03300, Eq. 3).

    J = 1/G sum_i 1/|o_i| sum_t [ min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i) - beta KL_it ]
    A_i = (R_i - mean R) / std R,   KL_it = pi_ref / pi - log(pi_ref / pi) - 1  (k3, Eq. 4)

with outcome supervision and several updates per rollout (`updates_per_rollout`, `num_iterations`).

Departures from the GRPO paper, most of them as in QeRL (arXiv 2510.11696, App. E and Table 4):

1. No KL by default (beta 0; the GRPO paper has 0.04). The reference is the base model: the policy with its adapter
   switched off and clean norms. The paper updates its reference to the policy from time to time.
2. The KL is k3 times the ratio by default, so that its gradient is the KL's (arXiv 2512.02556; TRL's default).
   `algorithm.kl_estimator=k3` is the paper's. Neither is corrected for noisy sampling.
3. Clip-higher: e_high is 0.28 and e_low 0.2, where the paper has one epsilon (`algorithm.epsilon_high=0.2`).
4. The sampler differs from pi_old by noise and kernels. `rollout.importance_correction` weighs a token by pi_old /
   pi_sampler, truncated. With `in_ratio` r_it = pi / pi_sampler instead, and the clip acts on that. QeRL's released
   code has neither: it treats noisy samples as on-policy.
5. The advantage divides by the unbiased standard deviation plus 1e-4, as TRL and QeRL's code do. It is exactly zero
   where all rewards of a group are equal. `algorithm.normalize_std=false` skips the division.
6. With `algorithm.mask_truncated` a masked completion counts as zero in the mean over completions.
"""

LOSS_TYPE = "grpo"
RATIO_OF = "token"
