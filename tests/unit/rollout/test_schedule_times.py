"""The search for the fastest schedule: what it climbs to, and what it leaves out. Humming and the GPU are stand-ins."""

import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch

OWN = {"mma_type": "wgmma", "num_stages": 4, "num_ctas_per_sm": 2, "use_warp_spec": True, "use_stream_k": True}
PLACES = [[[[32, 32], 64], 8], [[[32, 32], 64], 64], [[[64], 128], 8]]


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch):
    """`schedule_times` over stand-ins. A call costs less with more stages; seven are refused, six give another y."""
    vllm = types.ModuleType("vllm.utils.humming")
    kernel = types.ModuleType("humming.kernel.humming")
    testing = types.ModuleType("triton.testing")

    class HummingMethod:
        @staticmethod
        def get_default_tuning_configs(layer):
            return [[0, 16, OWN], [16, 8192, OWN | {"num_ctas_per_sm": 1}]]

        @staticmethod
        def forward_layer(layer, x, compute_config, tuning_config):
            schedule = json.loads(tuning_config)
            if schedule.get("use_stream_k") is False:
                raise RuntimeError("cuLaunchKernelEx: invalid argument")
            return x @ layer.dense.t() * (2 if schedule["num_stages"] == 6 else 1)

    class HummingKernel:
        @staticmethod
        def prepare_kernels(layer_config, compute_config, tuning_config, device):
            assert (layer_config, device) == ("a layer", torch.device("cpu"))
            if json.loads(tuning_config)["num_stages"] == 7:
                raise AssertionError("too many")

    vllm.HummingMethod, kernel.HummingKernel, testing.do_bench = HummingMethod, HummingKernel, None
    times = types.ModuleType("qerl_lab.rollout.vllm.backend_times")
    times.COPIED_BYTES, times.KERNELS, times.call_each, times.layer_of = 10_000, {}, None, None
    for name, module in {
        "vllm": types.ModuleType("vllm"), "vllm.utils": types.ModuleType("vllm.utils"), "vllm.utils.humming": vllm,
        "humming": types.ModuleType("humming"), "humming.kernel": types.ModuleType("humming.kernel"),
        "humming.kernel.humming": kernel, "triton": types.ModuleType("triton"), "triton.testing": testing,
        times.__name__: times,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "qerl_lab.rollout.vllm.schedule_times", raising=False)
    from qerl_lab.rollout.vllm import schedule_times

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
    monkeypatch.setattr(schedule_times, "loaded", loaded)
    monkeypatch.setattr(schedule_times, "end_with", lambda parent: None)
    monkeypatch.setattr(schedule_times.Search, "work", lambda self, schedule: schedule)
    monkeypatch.setattr(schedule_times, "do_bench", lambda work, **_: cost(work))
    monkeypatch.setattr(schedule_times, "side_by_side", lambda works, **_: {k: cost(v) for k, v in works.items()})
    yield schedule_times
    sys.modules.pop("qerl_lab.rollout.vllm.schedule_times", None)


def test_it_climbs_to_the_fastest_that_fits_and_is_right(
    timer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From 4 stages by doubling to 8, 16, 32; refused and wrong ones are passed over."""
    asked = {"format": {"name": "nvfp4"}, "places": PLACES, "device": 0, "parent": 1}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(asked)))
    timer.main([str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    assert len(found) == len(PLACES)
    for one in found:
        assert (one["schedule"]["num_stages"], one["schedule"]["use_pdl"]) == (32, True)
        assert one["us"][1] < one["us"][0]
        assert one["own"] == [[0, 16, OWN], [16, 8192, OWN | {"num_ctas_per_sm": 1}]]


def test_a_wrong_or_failing_schedule_is_infinitely_slow(timer) -> None:
    from qerl_lab import formats
    from qerl_lab.config.schema import FormatConfig

    layers = timer.Layers(formats.build(FormatConfig(name="nvfp4")), ((32, 32), 64))
    search = timer.Search(layers, 8)
    assert search.measure(json.dumps(OWN)) < float("inf")
    for wrong in ({"num_stages": 6}, {"use_stream_k": False}):
        assert search.measure(json.dumps(OWN | wrong)) == float("inf")
    assert layers.takes(json.dumps(OWN))
    assert not layers.takes(json.dumps(OWN | {"num_stages": 7}))
