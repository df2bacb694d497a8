"""Split the time of a decoded token by GPU kernel, with torch's profiler.

Two calls of different length are profiled, and their difference is taken as decoding, as in `rollout.Calls`. It also
contains the difference of two prefills. The extra tokens lie around the middle, so that attention reads as much as in
the timed calls. The profiler slows the host and widens gaps, so the results are kernel times, not step times.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import wait

SPAN = 64  # tokens by which the calls differ, if there are enough
LONGEST = 60  # characters of a kernel's name


class Kernel(NamedTuple):
    """One kernel launch; start and end in microseconds."""

    name: str
    start: float
    end: float


def profile_token(call: Callable[[int], object], short: int, new: int) -> Row:
    """Profile `call(n)`, which samples n tokens, at two n from `short` to `new`; return their `differences`."""
    first, last = token_counts(short, new)
    few, many = (launches(call, tokens) for tokens in (first, last))
    return differences(few, many, last - first)


def token_counts(short: int, new: int) -> tuple[int, int]:
    """Return the token counts of the two calls: `SPAN` apart, around the middle of `short` and `new`."""
    first = max(short, (short + new - SPAN) // 2)
    return first, min(new, first + SPAN)


def launches(call: Callable[[int], object], tokens: int) -> list[Kernel]:
    """Return every kernel and copy that ran on the GPU during a call."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call(tokens)
        wait()
    every = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in every]


def differences(few: Sequence[Kernel], many: Sequence[Kernel], tokens: int) -> Row:
    """Return the difference of `many` and `few` per token: `busy_us`, the time with a kernel running, and `kernels`.

    `kernels` lists name, launches and microseconds, longest first. Their sum exceeds `busy_us` if kernels overlap: a
    kernel that starts early and waits for the one before counts as running.
    """
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for every, sign in ((few, -1), (many, 1)):
        for name, start, end in every:
            calls_us = found[short_name(name)]
            calls_us[0] += sign / tokens
            calls_us[1] += sign * (end - start) / tokens
    kernels = [{"name": name, "calls": calls, "us": us} for name, (calls, us) in found.items()]
    return {
        "busy_us": (busy_microseconds(many) - busy_microseconds(few)) / tokens,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def busy_microseconds(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def short_name(name: str) -> str:
    """Return a kernel's name without template and call arguments."""
    plain = re.sub(r"^void |[<(].*$", "", name.replace("(anonymous namespace)", ""))
    return plain[:LONGEST] or name[:LONGEST]
