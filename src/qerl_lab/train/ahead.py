"""Sample the next step's batch while a step trains (rollout.vllm_server.overlap): one step off-policy.

While step t trains, a thread samples step t+1 from the adapter before the updates of step t, with the noise of step
t+1. The importance weights correct for the older adapter as they do for noise and kernels.
"""

from concurrent.futures import Future, ThreadPoolExecutor

from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine
from qerl_lab.train.ranks import ALONE
from qerl_lab.train.step import Batch, Clock, collect
from qerl_lab.train.training_data import Cursor

Ahead = Future[tuple[Batch, Cursor]]  # the batch of the next step, and a cursor that has passed its questions


def may_be_sampled_ahead(cfg: RunConfig, step: int) -> bool:
    """Tell whether `step` may be sampled while the step before it trains. Does not check `NoiseLevel.needs_solving`.

    False without overlap, for the first step, beyond the last step, after a checkpoint (a resumed run no longer has the
    older adapter), and after an evaluation, which needs the engine.
    """
    before = step - 1
    every = [count for count in (cfg.checkpoint.every, cfg.eval.every) if count]
    return cfg.overlaps and before not in (0, *cfg.extended, cfg.steps) and all(before % count for count in every)


def sample_ahead(cfg: RunConfig, step: int, cursor: Cursor, policy: Policy, engine: Engine) -> Ahead:
    """Start a thread that samples and grades `step` on the questions after `cursor`, with the engine's present weights.

    Nothing else may use the engine until the returned future is done. The future raises what `collect` raises. `cursor`
    is not moved, so that a checkpoint meanwhile does not skip these questions.
    """
    moved, thread = Cursor(cursor.data, cursor.position), ThreadPoolExecutor(1, "sample-ahead")
    clock = Clock(lambda: None)  # not the trainer's, which times only how long it waits for the batch
    ahead = thread.submit(lambda: (collect(cfg, step, moved, policy, engine, clock, ALONE), moved))
    thread.shutdown(wait=False)  # the thread ends after the batch
    return ahead
