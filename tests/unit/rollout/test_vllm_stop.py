"""The loop of `VllmEngine` over a fake LLM. tests/unit/rollout/test_contract.py has vLLM's own."""

import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from played_vllm import PlayedLlm, played_engine
from qerl_lab.rollout.engine import Completion, Engine, EngineFailed, Sampling
from qerl_lab.rollout.vllm.logprob_scheduler import LOGPROBS, completion_request_ids


class Endless:
    """A fake engine of vLLM that never finishes a request."""

    def __init__(self) -> None:
        self.steps, self.added, self.aborted = 0, list[str](), list[str]()

    def add_request(self, name: str, *_: object, **__: object) -> str:
        self.added.append(name)
        return name

    def has_unfinished_requests(self) -> bool:
        return True

    def step(self) -> list[SimpleNamespace]:
        self.steps += 1
        assert self.steps < 100, "nobody stopped it"
        return [SimpleNamespace(finished=False) for _ in self.added]

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names


@pytest.fixture
def play(policy, tiny, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Return a function that makes `VllmEngine` over an LLM with the given engine of vLLM."""
    with played_engine(monkeypatch, PlayedLlm) as module:

        def make(vllm: Endless, **changes: object) -> Engine:
            engine = object.__new__(module.VllmEngine)
            engine.policy, engine.cfg = policy, tiny(**changes)
            engine.llm, engine._adapter = PlayedLlm(policy.model), None
            engine.llm.llm_engine = vllm
            return engine

        yield make


def test_a_caller_may_stop_after_every_token(play: Callable[..., Engine]) -> None:
    told: list[int] = []

    def stop_at_the_third(count: int) -> None:
        told.append(count)
        if len(told) == 3:
            raise InterruptedError

    vllm = Endless()
    with pytest.raises(InterruptedError):
        play(vllm).generate([[3], [4, 5]], 2, Sampling(24, seed=7), stop_at_the_third)
    assert told == [0, 0, 0]
    assert vllm.steps == 3
    assert vllm.aborted == vllm.added == ["0", "1"]


class Slow(Endless):
    """A fake that takes 0.01 s per token."""

    def step(self) -> list[SimpleNamespace]:
        time.sleep(0.01)
        return super().step()


def test_a_rollout_fails_after_its_time_limit(play: Callable[..., Engine]) -> None:
    """The limit is 0.005 minutes, which are 0.3 s."""
    began = time.perf_counter()
    with pytest.raises(EngineFailed, match=r"finished 0 of 1 groups in rollout\.vllm\.timeout_minutes=0\.005"):
        play(Slow(), rollout__vllm__timeout_minutes=0.005).generate([[3]], 1, Sampling(24, seed=7))
    assert time.perf_counter() - began > 0.3


class TwoTokens(Endless):
    """A fake that ends the two completions of a group after two tokens, and lists the second one first.

    It stores log-probs as the scheduler does.
    """

    def has_unfinished_requests(self) -> bool:
        return self.steps < 2

    def step(self) -> list[SimpleNamespace]:
        super().step()
        for index, name in enumerate(completion_request_ids("0", 2)):
            LOGPROBS.setdefault(name, []).append(-float(self.steps + 10 * index))
        outputs = [SimpleNamespace(index=index, token_ids=[5, index], finish_reason="stop") for index in (1, 0)]
        return [SimpleNamespace(finished=self.steps == 2, request_id="0", outputs=outputs)]


def test_log_probs_of_a_stopped_rollout_do_not_reach_the_next(play: Callable[..., Engine]) -> None:
    """Completions of both have the same names in vLLM."""

    def stop(count: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        play(TwoTokens()).generate([[3]], 2, Sampling(24, seed=7), stop)
    out = play(TwoTokens()).generate([[3]], 2, Sampling(24, seed=7))
    assert out.completions == [
        Completion([5, 0], [-1.0, -2.0], "stop"), Completion([5, 1], [-11.0, -12.0], "stop")
    ]  # fmt: skip
