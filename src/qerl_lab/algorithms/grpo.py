"""GRPO: group-relative advantages and a clipped loss averaged over each sequence first (paper, Eq. 3 and 4).

Departures from the GRPO paper, as QeRL runs it (App. E and Table 4):

1. No KL term by default (beta 0), although Eq. 3 prints one.
2. Clip-higher: the upper clip is 0.28, the lower 0.2, where GRPO has one epsilon.
3. A ratio between sampler and trainer corrects for noisy sampling (`rollout.importance_correction`); the released
   code has none, so that noisy samples count as on-policy.
4. Advantages divide by (std + 1e-4) with the unbiased standard deviation, as TRL and the released code do.
"""

LOSS_TYPE = "grpo"
LACKS = ""
