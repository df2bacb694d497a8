"""Where the time of a decoded token goes: the GPU's kernels by name, as torch's profiler sees them in whole calls.

Two calls are profiled, one of more tokens. What the longer one has more is decoding alone, as in `rollout.Calls`, and
around the middle of those tokens, so that attention reads as much as in the timed calls. What two prefills differ by is
in it too. The profiler slows the host, so that gaps are longer than without it: what is told is how long kernels run,
not a step.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import wait

SPAN = 64  # tokens that the longer call has more, where there are as many
LONGEST = 60  # characters of a name


class Kernel(NamedTuple):
    """A launch on the GPU, microseconds of one clock."""

    name: str
    start: float
    end: float


def of_token(call: Callable[[int], object], short: int, new: int) -> Row:
    """What `differences` gives of `call(n)`, which samples n tokens of every completion, from `short` to `new`."""
    first, last = ends(short, new)
    few, many = (launches(call, tokens) for tokens in (first, last))
    return differences(few, many, last - first)


def ends(short: int, new: int) -> tuple[int, int]:
    """The tokens of the two calls: `SPAN` apart, around the middle of `short` and `new`, and within them."""
    first = max(short, (short + new - SPAN) // 2)
    return first, min(new, first + SPAN)


def launches(call: Callable[[int], object], tokens: int) -> list[Kernel]:
    """What ran on the GPU in a call; copies count."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call(tokens)
        wait()
    every = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
    return [Kernel(event.name, event.time_range.start, event.time_range.end) for event in every]


def differences(few: Sequence[Kernel], many: Sequence[Kernel], tokens: int) -> Row:
    """What `many` has more than `few`, by token: `busy_us`, microseconds in which any kernel ran, and `kernels`.

    Each of `kernels` is a name with its launches and microseconds, the longest first. They add up to more than
    `busy_us` where kernels overlap: one that may begin early waits for the one ahead, and is seen to run.
    """
    found: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for every, sign in ((few, -1), (many, 1)):
        for name, start, end in every:
            calls_us = found[short(name)]
            calls_us[0] += sign / tokens
            calls_us[1] += sign * (end - start) / tokens
    kernels = [{"name": name, "calls": calls, "us": us} for name, (calls, us) in found.items()]
    return {
        "busy_us": (busy(many) - busy(few)) / tokens,
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def busy(kernels: Iterable[Kernel]) -> float:
    """Microseconds in which any of them runs."""
    total, until = 0.0, float("-inf")
    for _, start, end in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def short(name: str) -> str:
    """A kernel's name without the arguments of its template and its call."""
    plain = re.sub(r"^void |[<(].*$", "", name.replace("(anonymous namespace)", ""))
    return plain[:LONGEST] or name[:LONGEST]
