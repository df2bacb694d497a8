"""A run that is out of memory says who holds it, and what to type."""

from pathlib import Path

import pytest
import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB
from qerl_lab.model.linear import weight_bytes
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.engine import ASLEEP
from qerl_lab.train import run
from qerl_lab.train.out_of_memory import bytes_by_owner, in_training
from qerl_lab.train.stop import Stop


def test_every_byte_of_the_policy_has_an_owner(tiny, build_policy) -> None:
    policy = build_policy(tiny())
    found = bytes_by_owner(policy, {"vLLM's weights": 7})
    learned = sum(p.nbytes for p in policy.model.parameters() if p.requires_grad)
    assert found["frozen base"] + learned == weight_bytes(policy.model).total
    assert found["adapter, its gradients and moments"] == 4 * learned > 0
    assert found["vLLM's weights"] == 7


def test_what_torch_holds_besides_is_activations_and_the_rest_others(tiny, build_policy, monkeypatch) -> None:
    """Of a shared GPU the others' memory is not this run's."""
    policy = build_policy(tiny())
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * GIB)
    found = bytes_by_owner(policy, {"vLLM's weights": 20 * GIB})
    assert sum(found.values()) == 80 * GIB
    assert 9 * GIB < found["activations and the rest"] < 10 * GIB
    assert found["others"] == 48 * GIB
    said = in_training(tiny(), policy, {}, Exception("CUDA out of memory. Tried to allocate 36.00 MiB. GPU 0 has a"))
    assert said.startswith("CUDA out of memory. Tried to allocate 36.00 MiB. In GiB: frozen")
    assert "others 48.00" in said
    assert "Type one of: a smaller jobs_per_gpu; " in said


def test_a_cache_that_sleeps_is_nobodys(tiny, build_policy, monkeypatch) -> None:
    """Torch counts it as reserved, and the GPU as free."""
    policy, cfg = build_policy(tiny()), tiny(rollout__engine="vllm", format__name="bf16")
    monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (14 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * GIB)
    cfg.rollout.vllm.sleep = True
    held = {"vLLM's weights": 5 * GIB, ASLEEP: 12 * GIB}
    found = bytes_by_owner(policy, held)
    assert ASLEEP not in found
    assert sum(found.values()) == 80 * GIB
    assert 12 * GIB < found["activations and the rest"] < 13 * GIB
    assert found["others"] == 48 * GIB
    said = in_training(cfg, policy, held, Exception("No memory."))
    assert "(vLLM's key-value cache, 12.00, sleeps and holds none)" in said
    assert "kv_cache" not in said
    assert "rollout.vllm.sleep" not in said
    assert "micro_batch_size lower" in said


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"optim__micro_batch_size": 16},
         ["micro_batch_size lower than 16", "gradient_checkpointing=true", "rollout.batch_size lower"]),
        ({"rollout__engine": "vllm", "format__name": "bf16", "model__gradient_checkpointing": True},
         ["kv_cache_gib lower", "kv_cache_dtype=fp8", "rollout.vllm.sleep=true"]),
    ],
)  # fmt: skip
def test_the_message_names_shares_and_keys(changes: dict, parts: list[str], tiny, build_policy) -> None:
    said = in_training(
        tiny(**changes), build_policy(tiny()), {"vLLM's weights": 3 * GIB}, Exception("No memory.\nMore")
    )
    assert said.startswith("No memory. In GiB: frozen base 0.0")
    assert "vLLM's weights 3.00" in said
    assert "jobs_per_gpu" not in said
    for part in parts:
        assert part in said
    assert ("gradient_checkpointing" in said) != changes.get("model__gradient_checkpointing", False)


def test_a_run_out_of_memory_ends_with_the_message(tiny, tmp_path: Path, monkeypatch) -> None:
    def train(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(run, "train", train)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2 GiB\. In GiB: frozen base 0\.0"):
        run.run(tiny(eval__questions=0), RunDirectory(tmp_path), Stop())


def test_a_server_s_batch_is_not_on_the_trainer_s_gpu(tiny, build_policy) -> None:
    cfg = tiny(rollout__engine="vllm_server")
    said = in_training(cfg, build_policy(tiny()), {}, Exception("No memory."))
    assert said.endswith("Type one of: optim.micro_batch_size lower than 4; model.gradient_checkpointing=true.")


def test_a_model_that_does_not_fit_while_it_is_loaded_says_who_has_the_gpu(tiny, tmp_path: Path, monkeypatch) -> None:
    def build(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 36.00 MiB. GPU 0 has a total")

    monkeypatch.setattr(run, "build_policy", build)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * GIB)
    for weight_format, remedy in (
        ("bf16", "; format=nvfp4; "),
        ("nvfp4", "jobs_per_gpu; a smaller model.path."),
    ):
        with pytest.raises(ConfigError) as caught:
            run.build_session(tiny(format__name=weight_format), RunDirectory(tmp_path), Stop())
        assert "does not fit on cpu (CUDA out of memory. Tried to allocate 36.00 MiB.)" in str(caught.value)
        assert "In GiB: this run 30.00, others 48.00, free 2.00." in str(caught.value)
        assert remedy in str(caught.value)
