"""Adaptive quantization noise (AQN, paper Sec. 3.3): the schedule of sigma, and the noise added to RMSNorm weights.

Departures from the released code, where AQN does nothing (its isinstance test never matches an engine's norms):

1. Noise is independent of the weight format: it can also be added to a BF16 model.
2. Each step adds its noise to a clean float32 copy of the norms, so that noise never accumulates.
3. It is drawn from (seed, step, layer) on the CPU, so that every rank, engine and resumed run draws the same noise.
4. Noisy norms are float32 in trainer and engines, whatever dtype the model computes in. bfloat16 cannot hold a small
   sigma: between 1 and 2 its steps are 0.0078.
5. The noise in the engine is measured (`noise/std_observed`, `noise/kl_nats`), not assumed.

The paper's text draws new noise for "each forward", its code once per rollout. The lab draws it once per step.
"""

from qerl_lab.aqn.noise import CLEAN, Noise, observed_std
from qerl_lab.aqn.schedule import level, stage

__all__ = ["CLEAN", "Noise", "level", "observed_std", "stage"]
