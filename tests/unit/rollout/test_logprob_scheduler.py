"""The scheduler that stores log-probs, over a fake of vLLM's scheduler.

test_contract.py has vLLM's own, if it is installed.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from played_modules import play
from qerl_lab.rollout.vllm import logprob_scheduler


class Scheduler:
    """A fake: takes one token of each running request, and returns no log-probs."""

    def __init__(self, vllm_config: Any, block_size: int) -> None:
        self.block_size, self.running, self.seen = block_size, {"0_a", "1_a", "b"}, []

    def update_from_output(self, scheduled: Any, output: Any) -> dict[int, Any]:
        self.seen.append(output.logprobs)
        tokens = {name: output.sampled_token_ids[row] for name, row in output.req_id_to_index.items()}
        emitted = [SimpleNamespace(request_id=name, new_token_ids=tokens[name]) for name in scheduled]
        return {0: SimpleNamespace(outputs=[output for output in emitted if output.request_id in self.running])}


class AsyncScheduler(Scheduler): ...


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    room = "vllm.v1.core.sched"
    play(monkeypatch, {
        "vllm": {}, "vllm.v1": {}, "vllm.v1.core": {}, room: {},
        f"{room}.scheduler": {"Scheduler": Scheduler}, f"{room}.async_scheduler": {"AsyncScheduler": AsyncScheduler},
    })  # fmt: skip
    monkeypatch.setattr(logprob_scheduler, "LOGPROBS", {})
    return logprob_scheduler.LOGPROBS


def built(is_async: bool = True) -> Any:
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    return logprob_scheduler.build_scheduler(vllm_config=config, block_size=16)


def told(names: list[str], nats: list[float] | None, tokens: list[list[int]] | None = None) -> Any:
    """Return the model's output for these requests, a row each."""
    logprobs = None if nats is None else SimpleNamespace(logprobs=np.array(nats)[:, None])
    rows = {name: row for row, name in enumerate(names)}
    return SimpleNamespace(req_id_to_index=rows, logprobs=logprobs, sampled_token_ids=tokens or [[5]] * len(names))


def test_each_completion_has_the_log_probs_of_its_own_tokens(kept: dict[str, list[float]]) -> None:
    """The scheduler and the model have different orders of requests."""
    own = built()
    own.update_from_output(["0_a", "1_a", "b"], told(["b", "0_a", "1_a"], [-1.0, -2.0, -3.0]))
    own.update_from_output(["b", "0_a"], told(["0_a", "b"], [-4.0, -5.0]))
    assert kept == {"0_a": [-2.0, -4.0], "1_a": [-3.0], "b": [-1.0, -5.0]}
    assert own.seen == [None, None]  # vLLM would hand on an object per token


def test_a_token_that_vllm_drops_has_no_log_prob(kept: dict[str, list[float]]) -> None:
    """A half-read prompt has no token yet. A token after the end of a request is dropped."""
    own = built()
    own.running.discard("1_a")
    own.update_from_output(["0_a", "1_a", "b"], told(["0_a", "1_a", "b"], [-1.0, -2.0, -3.0], [[], [5], [5]]))
    assert kept == {"b": [-3.0]}


def test_without_log_probs_nothing_is_stored(kept: dict[str, list[float]]) -> None:
    assert built().update_from_output(["b"], told(["b"], None))[0].outputs[0].new_token_ids == [5]
    assert kept == {}


@pytest.mark.parametrize(("is_async", "expected"), [(True, AsyncScheduler), (False, Scheduler)])
def test_the_scheduler_is_of_the_class_that_vllm_would_have_taken(kept: Any, is_async: bool, expected: type) -> None:
    own = built(is_async)
    assert isinstance(own, expected)
    assert isinstance(own, AsyncScheduler) == is_async
    assert own.block_size == 16


def test_completions_have_the_names_of_vllm() -> None:
    assert logprob_scheduler.completion_request_ids("3-5af0", 1) == ["3-5af0"]
    assert logprob_scheduler.completion_request_ids("3-5af0", 2) == ["0_3-5af0", "1_3-5af0"]
