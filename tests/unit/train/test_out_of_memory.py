"""The message of a run out of memory says what holds the memory, and what to type."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.gpu_memory import limit_to_part, part_bytes
from qerl_lab.model.linear import total_bytes
from qerl_lab.model.policy import Policy
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train import run
from qerl_lab.train.out_of_memory import bytes_by_owner, message_in_training
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.stop import Stop

TORCH = "CUDA out of memory. Tried to allocate 36.00 MiB."
VLLM = {"rollout__engine": "vllm", "format__name": "bf16"}
WEIGHTS, ON_CPU = "vLLM's weights", "frozen base 0.0"


@pytest.fixture
def on_gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Puts the policy on a GPU of 80 GiB, of which so many are free and torch has reserved 30."""

    def put(free: int) -> None:
        monkeypatch.setattr(type(policy), "device", torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 30 * GIB)

    return put


def test_every_byte_of_the_policy_has_an_owner(policy: Policy) -> None:
    found = bytes_by_owner(policy, {WEIGHTS: 7})
    learned = sum(p.nbytes for p in policy.model.parameters() if p.requires_grad)
    assert found["frozen base"] + learned == total_bytes(policy.model)
    assert found["adapter, its gradients and moments"] == 4 * learned > 0
    assert found[WEIGHTS] == 7


def test_what_torch_holds_besides_is_activations_and_the_rest_others(
    policy: Policy, on_gpu: Callable[[int], None]
) -> None:
    """Memory that other programs hold on a shared GPU does not count for this run."""
    on_gpu(2)
    found = bytes_by_owner(policy, {WEIGHTS: 20 * GIB})
    assert sum(found.values()) == 80 * GIB
    assert 9 * GIB < found["activations and the rest"] < 10 * GIB
    assert found["others"] == 48 * GIB


@pytest.mark.parametrize(
    ("changes", "held", "free", "parts", "absent"),
    [
        ({"optim__micro_batch_size": 16}, {WEIGHTS: 3 * GIB}, None,
         [ON_CPU, "vLLM's weights 3.00", "micro_batch_size lower than 16", "gradient_checkpointing=true",
          "rollout.batch_size lower"], "jobs_per_gpu"),
        (VLLM | {"model__gradient_checkpointing": True}, {}, None,
         [ON_CPU, "kv_cache_gib lower", "kv_cache_dtype=fp8"], "gradient_checkpointing"),
        ({"rollout__engine": "vllm_server"}, {}, None, ["Type one of: optim.micro_batch_size"], "rollout."),
        ({"optim__micro_batch_size": 1}, {}, None, ["one of: rollout.max_completion_tokens lower than 16"], "micro_b"),
        ({"lora__rank": 0, "format__name": "bf16"}, {}, None, ["; lora=rank32; "], "jobs_per_gpu"),
        ({}, {}, 49, ["others 1.00"], "jobs_per_gpu"),
        ({}, {}, 2, ["others 48.00", "Type one of: a smaller jobs_per_gpu; "], "GPU 0"),
        (
            {"jobs_per_gpu": 2}, {}, 50,
            ["with jobs_per_gpu=2 this run may take 39.00 GiB. Type one of: a smaller jobs_per_gpu; "], "GPU 0",
        ),
    ],
    ids=["transformers", "vllm", "server", "one", "all weights", "CUDA's own", "shared", "part"],
)  # fmt: skip
def test_the_message_names_shares_and_keys(
    tiny, policy: Policy, on_gpu: Callable[[int], None],
    changes: dict, held: dict[str, int], free: int | None, parts: list[str], absent: str,
) -> None:  # fmt: skip
    cfg = tiny(**changes)
    if free:
        on_gpu(free)
    said = message_in_training(cfg, policy, held, Exception(f"{TORCH} GPU 0 has a\nMore"))
    assert said.startswith(f"{TORCH} In GiB: frozen base ")
    assert [part for part in parts if part not in said] == []
    assert absent not in said


@pytest.mark.parametrize("function", ["train", "micro_batch.choose"])
def test_a_run_out_of_memory_ends_with_the_message(tiny, tmp_path: Path, monkeypatch, function: str) -> None:
    def run_out(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(f"{run.__name__}.{function}", run_out)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2 GiB\. In GiB: frozen base 0\.0"):
        run.run(tiny(eval__questions=0, optim__micro_batch_size=None), RunDirectory(tmp_path), Stop())


@pytest.mark.parametrize(("jobs", "part"), [(1, []), (2, [39 / 80]), (4, [19 / 80])])
def test_a_job_that_shares_a_gpu_takes_at_most_its_part(
    tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: Callable[[int], None], jobs: int, part: list[float]
) -> None:
    """Torch keeps freed memory, so without a limit the other jobs find none. CUDA itself takes the odd GiB."""
    parts: list[tuple[int, float]] = []
    chosen = [0]  # GPUs as torch chooses them: the first, until the rank joins the others

    def join(cfg: RunConfig, device: torch.device) -> Ranks:
        chosen.append(1)
        return ALONE

    def build(*_: object) -> None:
        assert parts == [(1, pytest.approx(fraction)) for fraction in part], "too late: the model is on the GPU"
        raise torch.OutOfMemoryError(TORCH)

    on_gpu(80)
    monkeypatch.setattr(run, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(run, "join", join)
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1])
    monkeypatch.setattr(  # of torch's C++, so that torch's own checks of the arguments stay
        torch._C, "_cuda_setMemoryFraction", lambda fraction, index: parts.append((index, fraction)), raising=False
    )
    monkeypatch.setattr(run, "build_policy", build)
    with pytest.raises(ConfigError, match="does not fit on cuda.*" + ("this run may take" if part else r"MiB\.\)\. T")):
        run.build_session(tiny(jobs_per_gpu=jobs), RunDirectory(tmp_path), Stop())


def test_a_part_is_less_the_gib_of_cuda_but_the_whole_gpu_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (GIB, 8 * GIB))
    assert [part_bytes(torch.device("cuda"), jobs) for jobs in (1, 2, 64)] == [8 * GIB, 3 * GIB, 0]
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    limit_to_part(torch.device("cpu"), 2)  # does nothing


@pytest.mark.parametrize(("name", "remedy"), [("bf16", "; format=nvfp4; "), ("nvfp4", "jobs_per_gpu; a smaller model")])
def test_a_model_that_does_not_fit_while_it_is_loaded_says_who_has_the_gpu(
    tiny, tmp_path: Path, monkeypatch, on_gpu: Callable[[int], None], name: str, remedy: str
) -> None:
    def build(*_: object) -> None:
        raise torch.OutOfMemoryError(f"{TORCH} GPU 0 has a total")

    on_gpu(2)
    monkeypatch.setattr(run, "build_policy", build)
    with pytest.raises(ConfigError) as caught:
        run.build_session(tiny(format__name=name), RunDirectory(tmp_path), Stop())
    assert f"does not fit on cpu ({TORCH} GPU 0 has a total). Type one of: " in str(caught.value)
    assert remedy in str(caught.value)
