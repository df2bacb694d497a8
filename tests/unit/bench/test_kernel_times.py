"""Where a token's time goes: what a longer call has more than a short one, by kernel."""

from typing import Any

import pytest
import torch

from bench_jobs import FakeSampler
from qerl_lab.bench import kernel_times, rollout
from qerl_lab.bench.gpu_timing import graphed
from qerl_lab.bench.kernel_times import Kernel, busy_microseconds, differences, short_name
from qerl_lab.report import bench

PREFILL = [Kernel("prefill", 0.0, 100.0)]


def tokens(number: int, start: float = 100.0) -> list[Kernel]:
    """A product of 6 microseconds a token, a sum that begins 1 before it ends, and a gap of 2."""
    each = []
    for token in range(number):
        at = start + 10.0 * token
        each += [Kernel("void product<128, 64>(float*)", at, at + 6.0), Kernel("sum", at + 5.0, at + 8.0)]
    return each


def test_the_prefill_is_in_both_calls_and_in_no_token() -> None:
    row = differences(PREFILL + tokens(3), PREFILL + tokens(11), 8)
    assert row["busy_us"] == pytest.approx(8.0)
    assert row["kernels"] == [
        {"name": "product", "calls": 1.0, "us": pytest.approx(6.0)},
        {"name": "sum", "calls": 1.0, "us": pytest.approx(3.0)},
        {"name": "prefill", "calls": 0.0, "us": 0.0},
    ]


def test_time_in_which_two_kernels_run_counts_once() -> None:
    assert busy_microseconds([]) == 0
    assert busy_microseconds([Kernel("late", 8.0, 9.0), Kernel("long", 0.0, 5.0), Kernel("inside", 1.0, 2.0)]) == 6.0


@pytest.mark.parametrize(("name", "shown"), [
    ("void humming<MmaOpClass<1>, Shape<0, 4608, 3584>>(int4*)", "humming"),
    ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8>(float*)", "at::native::::cunn_SoftMaxForward"),
    ("_expand", "_expand"), ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "), ("<lambda>", "<lambda>"),
])  # fmt: skip
def test_names_are_without_their_arguments(name: str, shown: str) -> None:
    assert short_name(name) == shown


@pytest.mark.parametrize(("timed", "profiled"), [((128, 512), (288, 352)), ((20, 81), (20, 81)), ((1, 2), (1, 2))])
def test_the_tokens_profiled_have_in_the_mean_the_length_of_those_timed(
    timed: tuple[int, int], profiled: tuple[int, int]
) -> None:
    assert kernel_times.token_counts(*timed) == profiled
    assert sum(timed) == sum(profiled)


def test_two_calls_are_profiled_after_the_timed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from test_bench_rollout import answer, job_of, options

    asked = []

    def launches(call: Any, number: int) -> list[Kernel]:
        asked.append(number)
        call(number)
        return PREFILL + tokens(number)

    monkeypatch.setattr(kernel_times, "launches", launches)
    sampler = FakeSampler(answer)
    (row,) = rollout.measure(sampler, job_of(options(batches=[4], kernels=True)))
    assert asked == [2, 8] == [new for _, new, _ in sampler.asked][-2:]
    assert row["kernels"][0]["name"] == "product"
    (plain,) = rollout.measure(FakeSampler(answer), job_of(options(batches=[4])))
    assert "kernels" not in plain


@pytest.mark.gpu
def test_the_profiler_sees_the_kernels_of_a_graph() -> None:
    x = torch.zeros(1024, device="cuda")
    step = graphed(lambda: x.add_(1))
    row = kernel_times.profile_token(lambda number: [step() for _ in range(number)], 8, 32)
    assert sum(kernel["calls"] for kernel in row["kernels"]) == pytest.approx(1)
    assert 0 < row["busy_us"] < 100


def test_the_table_names_the_longest_and_adds_up_the_others() -> None:
    about = {
        "arm": "nvfp4", "format": "nvfp4", "baseline": False, "rank": 4, "batch": 8, "tokens_per_second": 1.0,
        "tokens_per_second_min": 1.0, "tokens_per_second_max": 1.0, "decode_ms": 0.05, "sync_ms": 1.0,
        "start_seconds": 1.0, "weights_gib": 1.0, "kv_gib": 1.0, "used_gib": None, "model": "m", "busy_us": 40.0,
    }  # fmt: skip
    kernels = [{"name": f"k{number}", "calls": 2.0, "us": 20.0 - number} for number in range(14)]
    result = {"benchmark": "rollout", "rows": [about | {"kernels": kernels}], "options": {}}
    lines = bench.text(result).splitlines()
    assert lines[-14] == "nvfp4, rank 4, batch 8: kernels run for 40 microseconds of a token's 50"
    assert lines[-13].split() == ["20", "in", "2", "launches", "k0"]
    assert lines[-1].split() == ["15", "in", "4", "launches", "2", "others"]
