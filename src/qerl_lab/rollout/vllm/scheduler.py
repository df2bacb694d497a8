"""vLLM's scheduler, which keeps the log-probs of sampled tokens where the engine finds them.

vLLM itself hands each of them on as slices of three arrays, an object and items of four lists. With 256 completions
that is a quarter of what its scheduler and outputs take of the host. The GPU waits where it ends before the host does.

Which class schedules is an argument of `LLM`; vLLM warns that the class is no public interface.
tests/unit/rollout/test_contract.py holds what is used of it.
"""

from logging import LogRecord
from typing import Any

KEEPING = f"{__name__}.keeping"  # for `LLM(scheduler_cls=...)`

# Nats by vLLM's name of a completion, of the one engine in this process. vLLM has no way from an engine to its
# scheduler that it documents.
KEPT: dict[str, list[float]] = {}


def keeping(vllm_config: Any, **given: Any) -> Any:
    """Return the scheduler that vLLM would have taken, with `Keeping` over it."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    own = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("KeepingScheduler", (Keeping, own), {})(vllm_config=vllm_config, **given)


class Keeping:
    """What a scheduler does differently: nothing but where log-probs go."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take the log-probs off the sampled tokens, and keep those of each token that vLLM takes."""
        told, model_runner_output.logprobs = model_runner_output.logprobs, None
        outputs_of_clients = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if told is not None:
            row_of, nats = model_runner_output.req_id_to_index, told.logprobs[:, 0].tolist()
            for outputs in outputs_of_clients.values():
                for output in outputs.outputs:
                    if output.new_token_ids:  # one: the lab has no speculative decoding
                        KEPT.setdefault(output.request_id, []).append(nats[row_of[output.request_id]])
        return outputs_of_clients


def names(request: str, group_size: int) -> list[str]:
    """What vLLM names the completions of a request, which it named `request`."""
    return [request] if group_size == 1 else [f"{index}_{request}" for index in range(group_size)]


def news(record: LogRecord) -> bool:
    """Whether vLLM's log tells anything but that there is a scheduler of one's own."""
    return "custom scheduler class" not in str(record.msg)
