"""DAPO: clip-higher, token-level loss, no KL, dynamic sampling, overlong punishment (arXiv 2503.14476, Eq. 8 to 13).

    J = 1 / (sum_i |o_i|) sum_i sum_t min(r_it A_i, clip(r_it, 1 - e_low, 1 + e_high) A_i),   A_i as in GRPO
    for groups with 0 < right answers < G, and R_i = task's reward + overlong punishment in [-1, 0]

The option `algorithm=dapo` sets all of it: e_low 0.2, e_high 0.28, `dynamic_sampling`, `mask_truncated` (overlong
filtering), `overlong_buffer_tokens=null` (a fifth of rollout.max_completion_tokens, as the paper's 4,096 of 20,480).
`algorithm=dapo_qerl` is what QeRL's released code calls DAPO: no dynamic sampling, no punishment.

Departures from the DAPO paper:

1. Dynamic sampling asks one further question per missing group, not a whole batch, at most `algorithm.max_resamples`
   times. Flat groups fill the rest; their advantage is zero except for the punishment. The metrics `rollout/groups_*`,
   `rollout/resample*` and `seconds/resample` count what was dropped and what it cost.
2. A group is kept if any part of the task's reward differs, not only the answer's. The punishment alone keeps no group.
3. A batch holds several questions. The mean runs over all their unmasked completion tokens, on all processes. Each of
   several updates divides by an equal share of that count. (TRL's `bnpo`, which QeRL uses, averages each micro-batch.)
4. The paper samples from pi_old. Here an importance weight corrects for noisy sampling, as in GRPO (4). The advantage
   is GRPO's (5).
5. Overlong filtering and punishment act together. A truncated completion is then not trained itself; its punishment
   only changes the advantages of the others in its group. The authors' script has the punishment alone, as with
   `algorithm.mask_truncated=false` (issue 13 of BytedTsinghua-SIA/DAPO: it replaced the filtering).
"""

LOSS_TYPE = "dapo"
RATIO_OF = "token"
