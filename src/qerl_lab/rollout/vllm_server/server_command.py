"""Build the `vllm serve` command for a run's settings. Imports no vllm."""

import json
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from qerl_lab import formats
from qerl_lab.config.keys import spell_value
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, RunConfig
from qerl_lab.config.spelling import hydra_override, spell_list
from qerl_lab.config.units import GIB
from qerl_lab.model import gguf, on_disk
from qerl_lab.model.loading import stored_as
from qerl_lab.model.policy import compute_dtype, device_of
from qerl_lab.rollout.vllm.transfer import MARLIN_FOR_FP8, max_rank, serving_arguments

# Allow adapters to change at run time; /collective_rpc and /reset_prefix_cache need development mode.
ENVIRONMENT = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_SERVER_DEV_MODE": "1"}


def commands(cfg: RunConfig) -> list[str]:
    """Return the shell lines that start a run's server, after a quantize command if the model must be packed.

    Unpacks a GGUF file into the cache. Raises ConfigError for a missing or damaged model.
    """
    path = cfg.model.path
    folder = gguf.unpack(gguf.existing_file(path, "model.path")) if gguf.is_gguf(path) else on_disk.local_path(path)
    packed = folder is not None and stored_as(folder) is not None  # take a hub model as dense without a download
    lines = []
    if cfg.format.name != DENSE_FORMAT and not packed:
        changed = formats.changed_options(cfg.format)
        how = [cfg.format.name, *(f"{key}_{spell_value(value)}" for key, value in changed.items())]
        served = f"packed/{Path(path).name.removesuffix(gguf.SUFFIX)}-{'-'.join(how)}"
        lines, model = [quantize_line(cfg, served)], [served]
    elif folder is not None:
        model = [str(folder.resolve())]
    else:
        model = [path, "--revision", cfg.model.revision] if cfg.model.revision else [path]
    environment = ENVIRONMENT | (MARLIN_FOR_FP8 if cfg.format.name == "fp8" else {})
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    return [*lines, f"{variables} {shlex.join(['vllm', 'serve', *model, *flags(cfg)])}"]


def quantize_line(cfg: RunConfig, out: str) -> str:
    """Return the shell command that packs the model, in the run's format, into the directory `out`."""
    words = [hydra_override("model", cfg.model.path), f"format={cfg.format.name}", hydra_override("out", out)]
    if cfg.model.revision:
        words.append(hydra_override("revision", cfg.model.revision))
    if cfg.format.ignore != FormatConfig().ignore:
        words.append(f"ignore={spell_list(cfg.format.ignore)}")
    words += [f"{key}={spell_value(value)}" for key, value in formats.changed_options(cfg.format).items()]
    return shlex.join(["python", "-m", "qerl_lab.quantize", *words])


def required_settings(cfg: RunConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the vLLM settings with which the server of a run must be started, by vLLM's names for them.

    `dtype` is the compute dtype.
    """
    backend = cfg.rollout.vllm.linear_backend
    usual = "marlin" if cfg.format.name == "fp8" else "auto"  # auto is vLLM's choice, which for FP8 is Humming
    return serving_arguments(cfg, dtype, device_of(cfg.device)) | {
        "enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank(cfg.lora.rank),
        "linear_backend": {"vllm": "auto", "auto": usual}.get(backend, backend),
    }  # fmt: skip


def flags(cfg: RunConfig) -> list[str]:
    """Return the command-line flags of `vllm serve` for a run, without the model."""
    server_cfg, cache_gib = cfg.rollout.vllm_server, cfg.rollout.vllm.kv_cache_gib
    url = urlsplit(server_cfg.url)
    given: dict[str, Any] = {"host": url.hostname, "port": url.port or (443 if url.scheme == "https" else 80)}
    given |= required_settings(cfg, compute_dtype(cfg, device_of(cfg.device)))
    if server_cfg.tensor_parallel > 1:
        given["tensor_parallel_size"] = server_cfg.tensor_parallel
    if cache_gib is not None:
        given["kv_cache_memory_bytes"] = int(cache_gib * GIB)
        given["gpu_memory_utilization"] = 0.01  # no effect with the line above, but checked against free memory
    words = list[str]()
    for name, value in given.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
