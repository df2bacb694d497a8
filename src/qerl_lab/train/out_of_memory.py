"""Report what holds a GPU's memory when a run runs out of it."""

import re

import torch

from qerl_lab.config.message import first_line
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.gpu_memory import part_bytes
from qerl_lab.model.linear import total_bytes
from qerl_lab.model.policy import Policy

OTHERS = "others"
MUCH_BY_OTHERS = 4 * GIB  # held by other programs; CUDA itself takes about half a GiB per program


def bytes_by_owner(policy: Policy, held_by_engine: dict[str, int]) -> dict[str, int]:
    """Return the bytes of memory on the policy's device by owner, with an entry "free" for free memory.

    `held_by_engine` is the result of `Engine.memory_bytes`. The owner "others" stands for other programs and CUDA's own
    memory. On a CPU only base, adapter and engine are counted.
    """
    learned = sum(parameter.nbytes for parameter in policy.model.parameters() if parameter.requires_grad)
    by_owner = {
        "frozen base": total_bytes(policy.model) - learned,
        f"{'weights' if policy.trains_all else 'adapter'}, its gradients and moments": 4 * learned,
        **held_by_engine,
    }
    if policy.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(policy.device)
        of_run = max(torch.cuda.memory_reserved(policy.device), sum(by_owner.values()))
        by_owner["activations and the rest"] = of_run - sum(by_owner.values())
        by_owner |= {OTHERS: max(0, total - free - of_run), "free": free}
    return by_owner


def message_while_loading(cfg: RunConfig, device: torch.device, error: Exception) -> str:
    """Return the error message for a model that does not fit on the GPU `device` when it is loaded.

    `error` is torch's out-of-memory error, which says how much memory is used and free.
    """
    remedies = ["CUDA_VISIBLE_DEVICES=N in front of the command, for another GPU", "a smaller jobs_per_gpu"]
    if cfg.format.name == DENSE_FORMAT:
        remedies.append("format=nvfp4")
    return (
        f"model.path={cfg.model.path} in {cfg.format.name} does not fit on {device} ({first_line(error)})"
        f"{_part_note(cfg, device)}. Type one of: {'; '.join(remedies)}; a smaller model.path."
    )


def _part_note(cfg: RunConfig, device: torch.device) -> str:
    """Format how much of a shared GPU this run may take, which can be less than is free; "" if it shares no GPU."""
    if device.type != "cuda" or cfg.jobs_per_gpu == 1:
        return ""
    part = part_bytes(device, cfg.jobs_per_gpu)
    return f"; with jobs_per_gpu={cfg.jobs_per_gpu} this run may take {part / GIB:.2f} GiB"


def message_in_training(cfg: RunConfig, policy: Policy, held_by_engine: dict[str, int], error: Exception) -> str:
    """Return the error message for a run out of memory in training: memory by owner, and config keys that lower it.

    `held_by_engine` is the result of `Engine.memory_bytes`, `error` torch's out-of-memory error.
    """
    by_owner = bytes_by_owner(policy, held_by_engine)
    remedies = []
    if cfg.jobs_per_gpu > 1 or by_owner.get(OTHERS, 0) > MUCH_BY_OTHERS:
        remedies.append("a smaller jobs_per_gpu")
    micro_batch_size = cfg.optim.chosen_micro_batch_size
    if micro_batch_size > 1:
        remedies.append(f"optim.micro_batch_size lower than {micro_batch_size}")
    else:
        remedies.append(f"rollout.max_completion_tokens lower than {cfg.rollout.max_completion_tokens}")
    if cfg.trains_all:
        remedies.append("lora=rank32")
    if not cfg.model.gradient_checkpointing:
        remedies.append("model.gradient_checkpointing=true")
    if cfg.rollout.engine == "vllm":
        remedies += ["rollout.vllm.kv_cache_gib lower than the cache above", "rollout.vllm.kv_cache_dtype=fp8"]
    elif cfg.rollout.engine == "transformers":
        remedies.append(f"rollout.batch_size lower than {cfg.rollout.batch_size}")
    # Without torch's list of processes.
    reason = re.sub(r"(Tried to allocate [\d.]+ \w+\.).*", r"\1", first_line(error))
    in_gib = ", ".join(f"{owner} {size / GIB:.2f}" for owner, size in by_owner.items())
    return f"{reason} In GiB: {in_gib}{_part_note(cfg, policy.device)}. Type one of: {'; '.join(remedies)}."
