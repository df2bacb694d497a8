"""A vLLM scheduler that stores the log-probs of sampled tokens in `LOGPROBS`, where the engine reads them.

vLLM passes each log-prob on as slices of three arrays, an object and items of four lists. With 256 completions this
takes a quarter of the host's time for scheduler and outputs. The GPU waits for the host whenever it ends first.

`LLM` takes the scheduler class as an argument; vLLM warns that the class is not a public interface.
tests/unit/rollout/test_contract.py fails if vLLM changes it.
"""

from typing import Any

SCHEDULER = f"{__name__}.build_scheduler"  # for `LLM(scheduler_cls=...)`

# Log-probs in nats, by vLLM's request id of a completion (`completion_request_ids`). A global, because vLLM documents
# no way from an engine to its scheduler; a process has one engine.
LOGPROBS: dict[str, list[float]] = {}


def build_scheduler(vllm_config: Any, **given: Any) -> Any:
    """Build the scheduler that vLLM would use, with `StoresLogprobs` mixed in. vLLM calls this like a class."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    usual = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    return type("LogprobScheduler", (StoresLogprobs, usual), {})(vllm_config=vllm_config, **given)


class StoresLogprobs:
    """Mixin that makes a vLLM scheduler store log-probs in `LOGPROBS`, and changes nothing else."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Override vLLM's hook: store each new token's log-prob in `LOGPROBS`; hide log-probs from vLLM's method."""
        sampled, model_runner_output.logprobs = model_runner_output.logprobs, None
        outputs_of_clients = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        if sampled is not None:
            row_of, nats = model_runner_output.req_id_to_index, sampled.logprobs[:, 0].tolist()
            for outputs in outputs_of_clients.values():
                for output in outputs.outputs:
                    if output.new_token_ids:  # one token, because the lab uses no speculative decoding
                        LOGPROBS.setdefault(output.request_id, []).append(nats[row_of[output.request_id]])
        return outputs_of_clients


def completion_request_ids(request_id: str, group_size: int) -> list[str]:
    """Return the request ids that vLLM gives the `group_size` completions of the request `request_id`, in order."""
    return [request_id] if group_size == 1 else [f"{index}_{request_id}" for index in range(group_size)]
