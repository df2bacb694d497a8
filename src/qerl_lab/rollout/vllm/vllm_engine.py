"""Rollout engine on vLLM in the trainer's process: packed base and the policy's adapter, or all weights; noisy norms.

Uses vLLM's documented interfaces only: `LLM(...)`, `add_request` and `step` of its engine, `add_lora`, `apply_model`,
`reset_prefix_cache`. The exception is logprob_scheduler.py: vLLM documents the interface that it uses as not public.
Tested by tests/unit/rollout/test_contract.py, and for every format by tests/gpu.
"""

import gc
import logging
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.parallel_state import destroy_model_parallel
from vllm.envs import disable_envs_cache
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import check_engine_on_cpu
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.gpu_memory import free_bytes
from qerl_lab.model.linear import packed_layers, total_bytes
from qerl_lab.model.on_disk import cache_bytes_per_token, read_model_json
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, Engine, EngineFailed, OnDone, Rollout, Sampling, do_nothing
from qerl_lab.rollout.vllm import all_weights, logprob_scheduler, one_copy
from qerl_lab.rollout.vllm.adapter import AdapterFile, DenseAdapter
from qerl_lab.rollout.vllm.backends import IN_VLLM, choose_backend
from qerl_lab.rollout.vllm.base import model_folder
from qerl_lab.rollout.vllm.kv_cache import kv_cache_bytes
from qerl_lab.rollout.vllm.transfer import (
    MARLIN_FOR_FP8,
    adapted_layers,
    check_adapter,
    check_norms,
    sampling_arguments,
    serving_arguments,
)

# Run vLLM in this process; `LLM` has no argument for it.
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
# On a GPU, use the model runner that draws for all seeded requests in one kernel. vLLM's default for most models
# launches a kernel per request and token: 256 completions of a 1.5B took 1.15 and 1.5 times as long (LOG.md).
SEEDS_IN_ONE_KERNEL = {"VLLM_USE_V2_MODEL_RUNNER": "1"}


class VllmEngine(Engine):
    """vLLM in the trainer's process, with its own copy of the policy's base. A process can have only one.

    With rollout.vllm.share_base the policy drops its base and uses vLLM's copy. A completion's draws depend on its
    seed, not on the other requests in its batch; on a GPU they can differ where vLLM sums in another order.

    Raises ConfigError if vLLM cannot serve the model in its format on this machine, or memory is too small.
    """

    def __init__(self, policy: Policy, cfg: RunConfig) -> None:
        self.policy, self.cfg = policy, cfg
        if policy.device.type == "cpu":
            check_engine_on_cpu(cfg, "torch sees none here")
        disable_envs_cache()  # once an engine has started, vLLM reads no environment variable of this process again
        os.environ.update(IN_THIS_PROCESS)
        if policy.device.type == "cuda":
            os.environ.update(SEEDS_IN_ONE_KERNEL)
        self._adapter: DenseAdapter | AdapterFile | None = None  # None: the run trains all weights
        if not cfg.trains_all:
            is_dense = cfg.rollout.vllm.lora == "dense"
            self._adapter = DenseAdapter(policy.model, cfg) if is_dense else AdapterFile(policy.model, cfg)
        share = cfg.rollout.vllm.share_base
        aside = one_copy.packed_on_host(policy) if share else nullcontext()
        with random_state_restored(policy.device), aside, model_folder(policy, cfg) as folder:
            self.linear_backend = choose_backend(cfg, policy.model)
            if cfg.format.name == "fp8":  # also off, because an earlier engine or the user's shell may have set it
                os.environ.update(dict.fromkeys(MARLIN_FOR_FP8, str(int(self.linear_backend == "marlin"))))
            adapter_arguments = self._adapter.arguments(folder, self.linear_backend) if self._adapter else {}
            self.llm = build_llm(cfg, folder, policy, self.linear_backend, adapter_arguments)
            self.model: nn.Module = self.llm.apply_model(lambda model: model)[0]  # vLLM's, which is in this process
            if share:
                self._share_base()
        if isinstance(self._adapter, DenseAdapter):
            self._adapter.attach(self.model)
        self._norms = self._find_norms()  # kept for `sync`, because the lookup takes a millisecond
        holder = f"vLLM, for model.path={cfg.model.path},"
        check_norms(self._norms, policy.clean_norms, holder, "Type rollout=transformers.")
        self.sync(CLEAN)
        if isinstance(self._adapter, AdapterFile):
            check_adapter(adapted_layers(self.model), policy.model, holder, "Type rollout.vllm.lora=dense.")

    def sync(self, noise: Noise) -> None:
        """Copy the policy's trained weights, and its norms plus `noise`, into vLLM. Raises EngineFailed if that fails.

        Resets the prefix cache too, which holds results of the old weights.
        """
        noisy = noise.onto_norms(self.policy.clean_norms)
        with raising_engine_failed("sync"):
            if self._adapter:
                self._adapter.sync(self.llm)
            else:
                all_weights.send(self.model, self.policy.base, self.cfg.model.path)
            for name, weight in noisy.items():
                self._norms[name].data.copy_(weight)  # in place, because CUDA graphs read this address
            if not self.llm.reset_prefix_cache():
                raise EngineFailed("vLLM kept its prefix cache at a sync: requests of the last rollout still run")
            if self.policy.device.type == "cuda":  # vLLM may sample on another stream than this one
                torch.cuda.synchronize(self.policy.device)

    def _share_base(self) -> None:
        """Let the policy use vLLM's copy of the base. Raises ConfigError if the trainer cannot read its layout."""
        torch.cuda.synchronize(self.policy.device)  # vLLM may have loaded on another stream
        if keep := one_copy.share(self.policy, self.model):
            print(
                f"warning: share_base=true: packed layers that keep weights of their own: {len(keep)}, the first "
                f"{keep[0]}. The engine has other bits there: Marlin drops block scales below 2^-6, "
                "fp4_tiles has one way to write a block of zeros."
            )

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norm weights back from vLLM's modules, by full layer name."""
        return {name: weight.detach().clone() for name, weight in self._find_norms().items()}

    def _find_norms(self) -> dict[str, nn.Parameter]:
        """Return vLLM's parameters for the norms of `policy.norms`, by full layer name, without norms that it lacks."""
        weights = dict(self.model.named_parameters())
        return {name: weights[key] for name in self.policy.norms if (key := f"{name}.weight") in weights}

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample `group_size` completions of each prompt, without log-probs if top_p < 1.

        Raises EngineFailed if vLLM fails or needs more than rollout.vllm.timeout_minutes.
        """
        started, engine = time.perf_counter(), self.llm.llm_engine
        lora = self._adapter.request if self._adapter else None
        minutes = self.cfg.rollout.vllm.timeout_minutes
        deadline = started + 60 * minutes
        request_ids_P_G = list[list[str]]()  # of the completions
        done = dict[str, RequestOutput]()  # by request id
        logprob_scheduler.LOGPROBS.clear()  # leftovers of a failed rollout
        with random_state_restored(self.policy.device):
            try:
                for index, (ids, seed) in enumerate(zip(prompt_ids_P, sampling.seeds(len(prompt_ids_P)), strict=True)):
                    given = sampling_arguments(sampling, group_size, seed, self.policy.end_ids())
                    params = SamplingParams(**given, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
                    prompt = {"prompt_token_ids": ids}
                    with raising_engine_failed("generate"):
                        request_id = engine.add_request(str(index), prompt, params, lora_request=lora)
                    request_ids_P_G.append(logprob_scheduler.completion_request_ids(request_id, group_size))
                while engine.has_unfinished_requests():
                    with raising_engine_failed("generate"):
                        finished = [output for output in engine.step() if output.finished]
                    done |= {output.request_id: output for output in finished}
                    on_done(sum(len(output.outputs) for output in finished))
                    if time.perf_counter() > deadline:
                        raise EngineFailed(
                            f"vLLM finished {len(done)} of {len(prompt_ids_P)} groups in rollout.vllm.timeout_minutes="
                            f"{minutes:g}. Type a larger one if that many tokens take longer."
                        )
            finally:
                if len(done) < len(prompt_ids_P):  # so that an interrupted engine can go on
                    engine.abort_request([str(index) for index in range(len(prompt_ids_P))])
        completions_P_G = [read_completions(done[str(p)], ids_G) for p, ids_G in enumerate(request_ids_P_G)]
        return Rollout(prompt_ids_P, completions_P_G, time.perf_counter() - started)

    def memory_bytes(self) -> dict[str, int]:
        """Return the bytes of vLLM's weights (without those shared with the policy) and of its key-value cache."""
        weights = total_bytes(self.model)  # including the copy for `dense_rows`
        weights -= one_copy.bytes_shared_with_vllm(self.policy)
        cache = self.llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes
        return {"vLLM's weights": weights, "vLLM's key-value cache": cache}

    def close(self) -> None:
        """Shut vLLM down in this process and release its memory. A second call does nothing."""
        if not hasattr(self, "llm"):  # closed before
            return
        if self._adapter:
            self._adapter.close()
        self._norms.clear()
        if self.cfg.gpus == 1:
            self.llm.llm_engine.engine_core.shutdown()
        else:  # that would destroy the process group, which is the trainer's and may be gone already
            self.llm.llm_engine.model_executor.shutdown()
            if torch.distributed.is_initialized():
                destroy_model_parallel()
            gc.unfreeze()  # vLLM froze loaded objects
        del self.llm, self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def read_completions(request: RequestOutput, request_ids_G: list[str]) -> list[Completion]:
    """Return the completions of a finished request, in order; take their log-probs out of the scheduler's store.

    `request_ids_G` are vLLM's request ids of the completions.
    """
    completions = []
    for output in sorted(request.outputs, key=lambda output: output.index):
        logprobs = logprob_scheduler.LOGPROBS.pop(request_ids_G[output.index], [])
        completions.append(Completion(list(output.token_ids), logprobs, str(output.finish_reason)))
    return completions


def build_llm(cfg: RunConfig, folder: Path, policy: Policy, backend: str, adapter_arguments: dict[str, Any]) -> LLM:
    """Build vLLM's `LLM` on the model directory `folder`, with the adapter's arguments `adapter_arguments`.

    `backend` is the kernel from `choose_backend`. Raises ConfigError if vLLM refuses the model or memory is too small.
    """
    config, dtype = read_model_json(folder / "config.json"), policy.dtype
    per_token = cache_bytes_per_token(config, 1 if cfg.rollout.vllm.kv_cache_dtype == "fp8" else dtype.itemsize)
    free = free_bytes(policy.device, cfg.jobs_per_gpu) - bytes_beside_cache(cfg, folder, policy)
    arguments: dict[str, Any] = {
        **serving_arguments(cfg, dtype, policy.device),
        "kv_cache_memory_bytes": kv_cache_bytes(cfg, per_token, free),
        "gpu_memory_utilization": 0.01,  # no effect with the line above, but checked against free memory
        "linear_backend": IN_VLLM.get(backend, backend),
        "scheduler_cls": logprob_scheduler.SCHEDULER,
        "use_tqdm_on_load": False,
        "distributed_executor_backend": "uni" if cfg.gpus == 1 else "external_launcher",
        "seed": cfg.seed % 2**31,
    }
    if cfg.format.activations == "fp8":  # by vLLM's kernel, because the dense adapter hides them from its compiler
        arguments["compilation_config"] = {"custom_ops": ["+quant_fp8"]}
    # Drop vLLM's warning that the class of a scheduler is not a public interface.
    logging.getLogger("vllm.config.scheduler").addFilter(lambda line: "custom scheduler class" not in str(line.msg))
    try:
        return LLM(model=str(folder), **arguments, **adapter_arguments)
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"vLLM cannot serve model.path={cfg.model.path} in {cfg.format.name} here ({type(error).__name__}: "
            f"{first_line(error)}). Type rollout=transformers, or change the setting that vLLM names."
        ) from error


def bytes_beside_cache(cfg: RunConfig, folder: Path, policy: Policy) -> int:
    """Return the bytes that the key-value cache must leave free: for vLLM's weights, and with lora=full for training.

    vLLM's weights are the files in `folder` and, with `dense_rows`, an unpacked copy. With lora=full the trainer
    makes gradients and optimizer state after vLLM has taken its cache.
    """
    vllm_cfg = cfg.rollout.vllm
    needed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if vllm_cfg.dense_rows:
        packed = packed_layers(policy.base).values()
        itemsize = 1 if vllm_cfg.dense_dtype == "fp8" else policy.dtype.itemsize
        needed += sum(layer.out_features * layer.in_features for layer in packed) * itemsize
    if policy.trains_all:
        trained = sum(weight.numel() for weight in policy.model.parameters() if weight.requires_grad)
        needed += trained * (4 + cfg.optim.moment_bytes)
    return needed


@contextmanager
def raising_engine_failed(what: str) -> Iterator[None]:
    """Context manager: turn RuntimeErrors (also out of memory) and vLLM's EngineDeadError into EngineFailed.

    `what` names the failed call in the message.
    """
    try:
        yield
    except EngineFailed:
        raise
    except torch.OutOfMemoryError as error:
        raise EngineFailed(
            f"vLLM is out of memory in {what} ({first_line(error)}). Type a lower rollout.vllm.kv_cache_gib, "
            "rollout.vllm.max_num_batched_tokens, rollout.batch_size, or optim.micro_batch_size."
        ) from error
    except (RuntimeError, EngineDeadError) as error:
        raise EngineFailed(f"vLLM failed in {what} ({type(error).__name__}: {first_line(error)})") from error


@contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Context manager: restore all random generators at the end, because vLLM seeds them in the trainer's process."""
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - vLLM seeds the legacy generator
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
