"""The search for the fastest schedule: what it climbs to, and what it leaves out. Humming and the GPU are stand-ins."""

import importlib
import io
import json
import sys
import types
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from played_modules import play
from qerl_lab import formats
from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm import schedules  # with the real triton, before a stand-in takes its place

OWN = {"mma_type": "wgmma", "num_stages": 4, "num_ctas_per_sm": 2, "use_warp_spec": True, "use_stream_k": True}
PLACES = [[[[32, 32], 64], 8], [[[32, 32], 64], 64], [[[64], 128], 8]]


class HummingMethod:
    """What vLLM calls of Humming: six stages give another y, and without stream K a launch fails."""

    @staticmethod
    def get_default_tuning_configs(layer: torch.nn.Module) -> list:
        return [[0, 16, OWN], [16, 8192, OWN | {"num_ctas_per_sm": 1}]]

    @staticmethod
    def forward_layer(layer: Any, x: Tensor, compute_config: str, tuning_config: str) -> Tensor:
        schedule = json.loads(tuning_config)
        if schedule.get("use_stream_k") is False:
            raise RuntimeError("cuLaunchKernelEx: invalid argument")
        return x @ layer.dense.t() * (2 if schedule["num_stages"] == 6 else 1)


class HummingKernel:
    """Seven stages do not fit."""

    @staticmethod
    def prepare_kernels(layer_config: str, compute_config: str, tuning_config: str, device: torch.device) -> None:
        assert (layer_config, device) == ("a layer", torch.device("cpu"))
        if json.loads(tuning_config)["num_stages"] == 7:
            raise AssertionError("too many")


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`schedule_times` over stand-ins: a call costs less with more stages, and with launches that begin early."""
    name = schedules.TIMER
    play(monkeypatch, {
        "vllm": {}, "vllm.utils": {}, "vllm.utils.humming": {"HummingMethod": HummingMethod}, "humming": {},
        "humming.kernel": {}, "humming.kernel.humming": {"HummingKernel": HummingKernel}, "triton": {},
        "triton.testing": {"do_bench": None},
        "qerl_lab.rollout.vllm.backend_times": {
            "COPIED_BYTES": 10_000, "KERNELS": {}, "layer_of": None,
            **dict.fromkeys(["call_each", "followed", "in_one"]),
        },
    })  # fmt: skip
    monkeypatch.delitem(sys.modules, name, raising=False)
    schedule_times = importlib.import_module(name)

    def loaded(weight_format, packed, sizes):
        layer = torch.nn.Module()
        shape = sum(sizes), 2 * packed["weight_packed"].shape[1]
        layer.weight = layer.dense = weight_format.dequantize(packed, shape, torch.bfloat16)
        layer.humming_metas = {"": types.SimpleNamespace(to_str=lambda: "a layer")}
        layer.compute_config = "{}"
        return layer

    def cost(schedule: str) -> float:
        read = json.loads(schedule)
        return 10 / read["num_stages"] + (0 if read.get("use_pdl") else 1) + (read.get("smem_reuse_mode") == "none")

    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **about: real(*size, **about | {"device": "cpu"}))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(schedule_times, "loaded", loaded)
    monkeypatch.setattr(schedule_times, "end_with", lambda parent: None)
    monkeypatch.setattr(schedule_times.Search, "work", lambda self, schedule: schedule)
    monkeypatch.setattr(schedule_times, "do_bench", lambda work, **_: cost(work))
    monkeypatch.setattr(schedule_times, "side_by_side", lambda works, **_: {k: cost(v) for k, v in works.items()})
    yield schedule_times
    del sys.modules[name]


def test_it_climbs_to_the_fastest_that_fits_and_is_right(
    timer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From 4 stages by doubling to 8 and 16; refused and wrong ones are passed over."""
    asked = {"format": {"name": "nvfp4"}, "places": PLACES, "device": 0, "parent": 1}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    timer.main([str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    assert len(found) == len(PLACES)
    for one in found:
        assert (one["schedule"]["num_stages"], one["schedule"]["use_pdl"]) == (16, True)
        assert one["us"][1] < one["us"][0]
        assert one["in_one"] is None, "64 and 128 columns are not what fp4_linear takes"
        assert one["own"] == [[0, 16, OWN], [16, 8192, OWN | {"num_ctas_per_sm": 1}]]


def test_a_wrong_or_failing_schedule_is_infinitely_slow(timer) -> None:
    layers = timer.Layers(formats.build(FormatConfig(name="nvfp4")), ((32, 32), 64))
    search = timer.Search(layers, 8)
    assert search.measure(json.dumps(OWN)) < float("inf")
    for wrong in ({"num_stages": 6}, {"use_stream_k": False}):
        assert search.measure(json.dumps(OWN | wrong)) == float("inf")


def test_a_schedule_that_is_wrong_now_and_then_is_not_taken(timer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight stages are the fastest here, and every twentieth y of theirs is another."""
    layers = timer.Layers(formats.build(FormatConfig(name="nvfp4")), ((32, 32), 64))
    search, calls, real = timer.Search(layers, 8), count(1), timer.call

    def call(layer: Any, schedule: str, x: Tensor) -> Tensor:
        races = json.loads(schedule)["num_stages"] == 8 and next(calls) % 20 == 0
        return real(layer, schedule, x) * (2 if races else 1)

    monkeypatch.setattr(timer, "call", call)
    search.us = {timer.written(OWN | {"num_stages": stages}): 10 / stages for stages in (4, 5, 8)}
    assert search.final()["schedule"]["num_stages"] == 5


@pytest.mark.parametrize(("capability", "rows", "name", "is_timed"), [
    ((9, 0), 8, "nvfp4", True), ((9, 0), 9, "nvfp4", False), ((8, 9), 8, "nvfp4", False), ((9, 0), 8, "mxfp4", False),
])  # fmt: skip
def test_few_rows_are_timed_by_fp4_linear_too_where_it_takes_them(
    timer: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], rows: int, name: str, is_timed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(timer.Search, "work_in_one", lambda self: timer.written(OWN | {"num_stages": 100}))
    search = timer.Search(timer.Layers(formats.build(FormatConfig(name=name)), ((32, 32), 256)), rows)
    search.us = {timer.written(OWN): 3.5}
    found = search.final()
    assert found["in_one"] == (pytest.approx(1e3 * 1.1 / len(search.layers.each)) if is_timed else None)
    assert found["schedule"] == OWN, "it is no schedule of Humming's"


def test_what_a_layer_does_not_take_is_refused(timer: Any) -> None:
    layers = timer.Layers(formats.build(FormatConfig(name="nvfp4")), ((32, 32), 64))
    assert layers.takes(json.dumps(OWN))
    assert not layers.takes(json.dumps(OWN | {"num_stages": 7}))
