"""DAPO: clip-higher, a loss that each token counts the same in, no KL, dynamic sampling, overlong completions (arXiv
2503.14476, Eq. 8 to 13).

    J = 1 / (sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i),   A_i as in GRPO
    for groups with 0 < right answers < G, and R_i = task's reward + overlong punishment in [-1, 0]

The option `algorithm=dapo` is all of it: e_low 0.2, e_high 0.28, `dynamic_sampling`, `mask_truncated` (its overlong
filtering), `overlong_buffer_tokens=null` (a fifth of rollout.max_completion_tokens, as its 4,096 of 20,480).
`algorithm=dapo_qerl` is what QeRL's released code calls DAPO: without dynamic sampling and punishment.

Departures from the DAPO paper:

1. Dynamic sampling asks as many further questions as groups are missing, not a batch, at most
   `algorithm.max_resamples` times; groups that say nothing fill the rest, with advantage zero but for the punishment.
   What it dropped and cost is in the metrics `rollout/groups_*`, `rollout/resample*` and `seconds/resample`.
2. A group counts where any part of the task's reward differs, not the answer's alone. The punishment keeps no group.
3. Several questions make a batch, and the mean runs over all their completion tokens that count, on all processes;
   each of several updates divides by its equal share of them. (TRL's `bnpo`, QeRL's, averages each micro-batch.)
4. The paper's own sampler is pi_old. Here a ratio corrects for noisy sampling, as in GRPO (4); the advantage is GRPO's
   (5) too.
"""

LOSS_TYPE = "dapo"
RATIO_OF = "token"
