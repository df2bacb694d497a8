"""GRPO: group-relative advantages and a clipped loss averaged over each sequence first (paper, Eq. 3 and 4).

Departures from the GRPO paper, as QeRL runs it (App. E and Table 4):

1. No KL term by default (beta 0), although Eq. 3 prints one.
2. Clip-higher: the upper clip is 0.28, the lower 0.2, where GRPO has one epsilon.
3. A ratio between sampler and trainer corrects for noisy sampling (`rollout.importance_correction`); the released
   code has none, so that noisy samples count as on-policy.
4. Advantages divide by (std + 1e-4) with the unbiased standard deviation, as TRL and the released code do; they are
   exactly zero where all rewards of a group are equal.
5. With beta > 0 the KL is estimated by k3 times the probability ratio, so that its gradient is that of the KL
   (DeepSeek-V3.2; TRL's default). The reference is the policy as the run began.
6. With `algorithm.mask_truncated` a masked completion is a zero in the mean over completions, not left out of it.
"""

LOSS_TYPE = "grpo"
PARTS: dict[str, str] = {}
