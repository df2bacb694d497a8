"""Measure rollouts on a scripted engine, and on vLLM if it is installed."""

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_jobs import ARCHITECTURE, FakeSampler, fake_llm
from played_modules import imported_over
from qerl_lab.bench import arm_processes, gpu, rollout
from qerl_lab.bench.bench_options import RolloutOptions
from qerl_lab.bench.job import Job
from vllm_engines import NEEDS_VLLM

NATS = math.log(300)


def options(**changes: Any) -> RolloutOptions:
    return RolloutOptions(**{"batches": [2, 4], "prompt": 12, "new": 8, "repeats": 3, "ranks": [4]} | changes)


def job_of(changed: RolloutOptions) -> Job:
    return Job("rollout", "bf16", "bf16", False, {}, 4, ARCHITECTURE, "", vars(changed))


def answer(prompts: list[list[int]], new: int) -> list[list[float]]:
    return [[-NATS] * new for _ in prompts]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the seconds of the wall clock, which only the test changes."""
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: seconds[0])
    return seconds


def taking(clock: list[float], seconds: Callable[[int], float]) -> FakeSampler:
    """Return a sampler. A call for `new` tokens takes `seconds(new)`."""

    def call(prompts: list[list[int]], new: int) -> list[list[float]]:
        clock[0] += seconds(new)
        return answer(prompts, new)

    return FakeSampler(call)


def test_calls_are_warmed_up_and_have_new_prompts_and_the_requested_tokens() -> None:
    sampler = FakeSampler(answer)
    rows = list(rollout.measure(sampler, job_of(options())))
    assert [row["batch"] for row in rows] == [2, 4]
    of_batch = [[new for prompts, new, _ in sampler.asked if len(prompts) == batch] for batch in (2, 4)]
    assert of_batch == [[8, 2] * 4] * 2  # a whole and a short call that do not count, then three of each
    every = [tuple(prompt) for prompts, *_ in sampler.asked for prompt in prompts]
    assert len(set(every)) == len(every)
    assert {len(prompt) for prompt in every} == {12}
    assert len({seed for *_, seed in sampler.asked}) == len(sampler.asked) == sampler.renewals
    assert all(row["nats"] == pytest.approx(NATS) for row in rows)


def test_speeds_are_medians_and_the_first_calls_do_not_count(clock: list[float]) -> None:
    # seconds of the calls: whole, short; the first pair is the warm-up
    took = iter([100.0, 100.0, 2.0, 0.5, 4.0, 0.5, 3.0, 0.7])
    (row,) = rollout.measure(taking(clock, lambda new: next(took)), job_of(options(batches=[4])))
    assert row["tokens_per_second"] == pytest.approx(4 * 8 / 3)
    assert (row["tokens_per_second_min"], row["tokens_per_second_max"]) == (4 * 8 / 4, 4 * 8 / 2)
    assert row["decode_ms"] == pytest.approx(1e3 * (3 - 0.5) / (8 - 2))
    assert (row["repeats"], row["prompt"], row["new"]) == (3, 12, 8)


@pytest.mark.parametrize(("runner", "expected"), [(2, 0.6), (1, None)])
def test_the_host_share_is_over_the_whole_calls_that_count(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, runner: int, expected: float | None
) -> None:
    """The share is measured only if the thread sleeps while it waits. The first model runner polls the GPU."""
    computes = [50.0, 50.0, 1.0, 0.1, 1.2, 0.1, 1.4, 0.1]  # of whole and short calls, the first two to warm up
    sampler = taking(clock, lambda new: 2.0 if new == 8 else 0.5)
    sampler.llm.llm_engine.vllm_config.use_v2_model_runner = runner == 2
    monkeypatch.setattr(time, "thread_time", lambda: sum(computes[: len(sampler.asked)]))
    (row,) = rollout.measure(sampler, job_of(options(batches=[4])))
    assert row["host_share"] == pytest.approx(expected)


def test_copies_that_a_sync_queued_count_as_its_time(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM may return from a LoRARequest before its copies are done."""
    left = [0.0]

    def synchronize() -> None:
        clock[0] += left[0]
        left[0] = 0.0

    def renew() -> None:
        left[0] = 0.25

    def generate(prompts: list[list[int]], new: int) -> list[list[float]]:
        synchronize()  # tokens come after all earlier work of the GPU
        clock[0] += 2.0
        return answer(prompts, new)

    sampler = FakeSampler(generate)
    monkeypatch.setattr(sampler, "renew", renew)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.torch.cuda, "synchronize", synchronize)
    row = rollout.time_calls(sampler, job_of(options()), 4)
    assert (row["sync_ms"], row["seconds"]) == (250, 2.0)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (
            FakeSampler(lambda prompts, new: [[-NATS] * (new - 1) for _ in prompts]),
            "asked for 2 x 8 tokens, and got 2 completions of",
        ),
        (
            FakeSampler(lambda prompts, new: [[-NATS] * new for _ in prompts[1:]]),
            "asked for 2 x 8 tokens, and got 1 completions of",
        ),
        (FakeSampler(lambda prompts, new: [[math.nan] * new for _ in prompts]), "nan nats in the mean"),
        (FakeSampler(lambda prompts, new: [[-0.01] * new for _ in prompts]), "0.01 nats in the mean"),
        (FakeSampler(answer, blocks=4), "holds 64 tokens, and the largest batch has 80"),
    ],
)
def test_wrong_completions_end_the_arm(sampler: FakeSampler, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        list(rollout.measure(sampler, job_of(options())))


def test_a_row_has_the_settings_that_decide_the_speed() -> None:
    row = next(iter(rollout.measure(FakeSampler(answer), job_of(options()))))
    expected = {"max_num_seqs": 4, "prefix_caching": True, "model_runner": 2, "kv_tokens": 16_000, "kv_gib": 1.0}
    assert row == row | expected | {"weights_gib": (8 * 4 + 4) * 4 / 2**30}


def test_shared_weights_count_once_and_a_cache_by_share_of_the_gpu_has_no_size() -> None:
    """TRL gives its vLLM a share of the GPU, and no size of the cache."""
    llm = fake_llm()
    llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes = None
    head, embedding = torch.nn.Linear(8, 4, bias=False), torch.nn.Embedding(4, 8)
    head.weight = torch.nn.Parameter(embedding.weight.data)  # another parameter on the same memory
    llm.apply_model = lambda function: [function(torch.nn.ModuleList([head, embedding]))]
    assert rollout.memory(llm) == {"weights_gib": 4 * 8 * 4 / 2**30, "kv_gib": None}


def test_the_clock_is_the_median_of_the_complete_lines() -> None:
    assert gpu.median_clock("1980\n1500\n[N/A]\n1900\n18") == 1900
    assert gpu.median_clock("No devices were found\n") is None


def test_the_cache_holds_every_sequence_and_one_more_block() -> None:
    per_token = 2 * 2 * 2 * 32 * 2  # keys and values, layers, heads, their size, bytes
    assert job_of(options(prompt=12, new=8)).kv_gib(4) * 2**30 == 5 * 256 * per_token


@pytest.mark.parametrize("has_adapter", [True, False])
def test_stock_vllm_uses_an_adapter_only_with_enable_lora(monkeypatch: pytest.MonkeyPatch, has_adapter: bool) -> None:
    """vLLM with enable_lora=false is as fast as with an adapter merged into the weights."""
    loaded, asked = [], []

    class PlayedLlm:
        def __init__(self, model: str, enable_lora: bool, **_: Any) -> None:
            config = SimpleNamespace(lora_config="lora" if enable_lora else None)
            self.llm_engine = SimpleNamespace(vllm_config=config, add_lora=loaded.append)

        def reset_prefix_cache(self) -> bool:
            return True

        def generate(self, prompts: Any, how: Any, use_tqdm: bool, lora_request: Any) -> list[Any]:
            asked.append(lora_request)
            return []

    def request(name: str, number: int, lora_path: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(lora_path=lora_path)

    job = job_of(options())
    job.overrides["enable_lora"] = has_adapter
    modules = {"vllm": {"LLM": None, "SamplingParams": SimpleNamespace}, "vllm.lora": {}}
    modules |= {"vllm.lora.request": {"LoRARequest": None}}
    with imported_over(monkeypatch, "qerl_lab.bench.stock_vllm", modules) as stock:
        monkeypatch.setattr(stock, "LLM", PlayedLlm)
        monkeypatch.setattr(stock, "LoRARequest", request)
        sampler = stock.StockSampler(job)
        sampler.renew()
        assert sampler.generate([[1, 2]], 8, 0) == []
    expected = [request("policy", 1, job.adapter)] if has_adapter else []
    assert (loaded, asked) == (expected, expected or [None])


# Per layer, columns of A and rows of B for q/k/v, o, gate/up and down. The lab also keeps the biases as stored.
A_AND_B = (3 * 128 + 256) + (128 + 128) + (2 * 128 + 2 * 192) + (192 + 128)
QKV_BIAS = 128 + 2 * 64
NORMS = 2 * 128  # in float32 in the lab's engine, so two bytes more each


@NEEDS_VLLM
def test_both_engines_are_measured_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arm_processes.ARCHITECTURES, "small", ARCHITECTURE)
    monkeypatch.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "1")
    asked = ["bf16_stock enforce_eager=true", "bf16 rollout.vllm.enforce_eager=true model.dtype=bfloat16"]
    small = options(model="small", arms=[*asked, "nf4"], scratch=str(tmp_path))
    *rows, dead = arm_processes.run(small)
    assert [(row["arm"], row["batch"]) for row in rows] == [(arm, batch) for arm in asked for batch in (2, 4)]
    for row in rows:
        assert row["tokens_per_second_min"] <= row["tokens_per_second"] <= row["tokens_per_second_max"]
        assert 0.9 * NATS < row["nats"] < 1.1 * NATS
        assert row["kv_tokens"] >= 4 * 20
    # Without chunked_prefill, which the lab's engine turns off on a CPU only.
    shared = ("max_num_seqs", "max_num_batched_tokens", "prefix_caching", "dtype")
    assert len({tuple(row[name] for name in shared) for row in rows}) == 1
    stock, own = ({row["weights_gib"] for row in rows if row["baseline"] == baseline} for baseline in (True, False))
    more = 2 * 2 * (4 * A_AND_B + QKV_BIAS + NORMS)  # two layers, two bytes, rank 4
    assert (own.pop() - stock.pop()) * 2**30 == more
    assert not own | stock
    assert "format.name=nf4 on a GPU only" in dead["died"]
