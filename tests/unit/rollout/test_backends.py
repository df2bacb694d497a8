"""The choice of the kernel for packed products."""

from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.model.linear import packed_layers
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.vllm import backends, fp4_tiles
from small_checkpoints import write_random

FITS = {"format__name": "nvfp4", "lora__rank": 8, "model__dtype": "bfloat16"}
AMPERE, HOPPER = (8, 0), (9, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with layers in multiples of 64."""
    return write_random(tmp_path_factory.mktemp("model"), hidden_size=128, intermediate_size=192,
                        num_attention_heads=2, num_key_value_heads=1)  # fmt: skip


@pytest.fixture
def policy(tiny, build_policy, folder: Path) -> Policy:
    return build_policy(tiny(**FITS, model__path=str(folder)))


def machine(patch: pytest.MonkeyPatch, capability: tuple[int, int], humming: str = "0.1.10", mps: bool = False) -> None:
    """Pretend to have this GPU and this version of Humming."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    patch.setattr(fp4_tiles, "shared_by_mps", lambda: mps)
    patch.setattr(backends, "version", {"humming-kernels": humming}.__getitem__)


@pytest.mark.parametrize(("keys", "capability", "taken"), [
    ({}, HOPPER, "fp4_tiles"), ({}, AMPERE, "vllm"), ({"lora__rank": 4}, HOPPER, "vllm"),
    ({"model__dtype": "float32"}, HOPPER, "vllm"), ({"rollout__vllm__lora": "request"}, HOPPER, "vllm"),
    ({"format__name": "mxfp4"}, HOPPER, "vllm"), ({"format__name": "bf16"}, HOPPER, "vllm"),
    ({"rollout__vllm__share_base": True}, HOPPER, "fp4_tiles"),
    ({"rollout__vllm__share_base": True}, AMPERE, "marlin"),
    ({"rollout__vllm__linear_backend": "marlin"}, HOPPER, "marlin"),
    ({"format__name": "fp8"}, HOPPER, "marlin"), ({"format__name": "fp8"}, AMPERE, "marlin"),
    ({"format__name": "fp8", "rollout__vllm__linear_backend": "vllm"}, HOPPER, "vllm"),
    ({"rollout__vllm__linear_backend": "fp4_tiles"}, AMPERE, "fp4_tiles"),
])  # fmt: skip
def test_auto_takes_the_labs_kernel_if_it_fits_and_otherwise_vllms_choice(
    tiny, build_policy, folder: Path, monkeypatch: pytest.MonkeyPatch, keys: dict, capability: tuple[int, int],
    taken: str,
) -> None:  # fmt: skip
    cfg = tiny(**FITS | {"model__path": str(folder)} | keys)
    policy = build_policy(cfg)
    machine(monkeypatch, capability)
    assert backends.choose_backend(cfg, policy.model) == taken


@pytest.mark.parametrize(("capability", "mps", "told"), [
    ((7, 5), False, ("compute capability 7.5: not tried", "nvfp4", "slow; type model.dtype=float32", "needs a GPU of")),
    ((8, 9), False, ("capability 8.9: not tried", "mxfp4", "bfloat16: in hardware", "needs a GPU of compute cap")),
    (HOPPER, False, ("compute capability 9.0", "nf4", "bfloat16: in hardware", "fp4_tiles of rollout=vllm: works")),
    (HOPPER, True, ("compute capability 9.0", "nf4", "bfloat16: in hardware", "cannot be where MPS shares the GPU")),
    ((7, 0), False, ("compute capability 7.0: too old",)),
], ids=["T4", "L4", "H100", "H100 with MPS", "V100"])  # fmt: skip
def test_the_description_of_a_gpu_says_what_works_on_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], mps: bool, told: tuple[str, ...]
) -> None:
    machine(monkeypatch, capability, mps=mps)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(backends, "find_spec", lambda name: name == "vllm")
    lines = backends.describe_gpu()
    assert len(lines) == len(told)
    assert [part for part, line in zip(told, lines, strict=True) if part not in line] == []


def test_fp4_tiles_is_not_taken_on_a_gpu_that_mps_shares(
    tiny, policy: Policy, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Launches of two processes would wait for each other's blocks."""
    machine(monkeypatch, HOPPER, mps=True)
    assert backends.choose_backend(tiny(**FITS), policy.model) == "vllm"
    assert "linear_backend=vllm, because fp4_tiles cannot be where MPS shares the GPU" in capsys.readouterr().out


def test_fp4_tiles_does_not_fit_fused_layers_with_a_scale_each(policy: Policy) -> None:
    assert backends.tiles_fit(policy.model, 8)
    layer = next(iter(packed_layers(policy.model).values()))
    layer.hold({name: tensor * 2 if "global" in name else tensor for name, tensor in layer.packed().items()})
    assert not backends.tiles_fit(policy.model, 8)


@pytest.mark.parametrize(("capability", "humming", "races"), [
    (HOPPER, "0.1.10", True), (HOPPER, "0.1.13rc1", True), (HOPPER, "0.1.13+cu130", False), ((8, 9), "0.1.10", False),
])  # fmt: skip
def test_a_humming_with_races_gets_a_warning(
    tiny, policy: Policy, monkeypatch: pytest.MonkeyPatch, capsys, capability: tuple[int, int], humming: str,
    races: bool,
) -> None:  # fmt: skip
    machine(monkeypatch, capability, humming)
    for name, backend in (("nvfp4", "humming"), ("fp8", "vllm")):  # vLLM chooses Humming for FP8 weights
        named = tiny(format__name=name, rollout__vllm__linear_backend=backend)
        assert backends.choose_backend(named, policy.model) == backend
        assert ("warning: the installed Humming has races" in capsys.readouterr().out) == races


@pytest.mark.parametrize(("weight_format", "changes", "key"), [
    ("fp8", {"format__activations": "fp8"}, r"format\.activations"),
    ("nvfp4", {"rollout__vllm__dense_rows": 8, "rollout__vllm__dense_dtype": "fp8"}, r"rollout\.vllm\.dense_dtype"),
])  # fmt: skip
def test_fp8_products_are_refused_on_a_gpu_without_fp8(
    tiny, policy: Policy, monkeypatch: pytest.MonkeyPatch, weight_format: str, changes: dict[str, Any], key: str
) -> None:
    machine(monkeypatch, AMPERE)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "an A100")
    cfg = tiny(format__name=weight_format, rollout__engine="vllm", rollout__vllm__linear_backend="vllm", device="cuda",
               **changes)  # fmt: skip
    with pytest.raises(ConfigError, match=rf"^{key}=fp8 is not possible on an A100; .* Type {key}=auto"):
        backends.choose_backend(cfg, policy.model)
    machine(monkeypatch, HOPPER)
    assert backends.choose_backend(cfg, policy.model) == "vllm"
