"""The worker class that vLLM runs, in the trainer's process and in a server: holds the noisy norms in float32.

Set by `worker_cls` (`vllm serve --worker-cls qerl_lab.rollout.vllm.worker.NormWorker`). With a server, the trainer
calls the methods `qerl_*` in every worker, by name and with plain JSON (`/collective_rpc`).
"""

from typing import Any

import torch
from torch import Tensor
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.platforms import current_platform

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.rollout.vllm.transfer import FLOAT32_NORMS, adapted_layers, encode_tensor

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class NormWorker(Worker):
    """vLLM's worker plus float32 norms, noise on them, and reloading of a server's one adapter."""

    def load_model(self, **options: Any) -> None:
        """Override vLLM's hook: load the model, then convert the norms named in vLLM's `additional_config` to float32.

        This must happen before vLLM compiles the model and captures CUDA graphs, which fix a weight's dtype and
        address. vLLM's RMSNorm multiplies in the dtype of its weight and returns the dtype of its input.
        """
        super().load_model(**options)
        names = self.vllm_config.additional_config[FLOAT32_NORMS]
        for name, module in self.get_model().named_modules():
            if name.rpartition(".")[2] in names and isinstance(module, RMSNorm | GemmaRMSNorm):
                module.weight.data = module.weight.data.float()

    def qerl_describe(self) -> dict[str, Any]:
        """Return this vLLM's quantization and settings, to compare with `server_command.required_settings`."""
        config = self.vllm_config
        model, lora = config.model_config, config.lora_config
        return {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "quantization": model.quantization,
            "quantization_config": getattr(model.hf_config, "quantization_config", None),
            "kv_cache_dtype": str(config.cache_config.cache_dtype),
            "linear_backend": str(config.kernel_config.linear_backend),
            "logprobs_mode": str(model.logprobs_mode),
            "generation_config": str(model.generation_config),
            "max_lora_rank": lora.max_lora_rank if lora else 0,
            "max_loras": lora.max_loras if lora else 0,
        }

    def qerl_clear(self) -> None:
        """Zero the key-value cache, as it was when vLLM started. The caller must then reset the prefix cache.

        A run with NaN in its weights leaves NaN in the cache. Attention of later runs multiplies it by zero, which
        gives NaN again. `kv_caches` is undocumented; tests/unit/rollout/test_contract.py fails without it
        (`check_nan`).
        """
        for cache in self.model_runner.kv_caches:
            for tensor in [cache] if isinstance(cache, Tensor) else cache:
                tensor.zero_()

    def qerl_adapter(self, name: str, folder: str) -> list[Any]:
        """Replace the loaded adapter, called `name`, by the files in `folder`. Do nothing unless exactly one is loaded.

        Uses `add_lora`, because after a /v1/load_lora_adapter request with load_inplace vLLM would read the files again
        at every token.

        Returns the ids of the loaded adapters, or [type, message] of an error. It raises no exception: if several
        workers did, vLLM would queue all answers but the first, and each later call would get an earlier call's answer.
        """
        held = sorted(self.list_loras())
        if len(held) == 1:
            try:
                self.add_lora(LoRARequest(name, held[0], folder, load_inplace=True))
            except Exception as error:  # report any error to the trainer
                return [type(error).__name__, str(error)]
        return sorted(self.list_loras())

    def qerl_adapted(self) -> list[str]:
        """List the layers of this worker for which vLLM holds an adapter (`adapted_layers`)."""
        return adapted_layers(self.get_model())

    def qerl_noise(self, names: list[str], sigma: str, seed: int, step: int, relative: bool) -> None:
        """Write clean weights + noise into the norms `names`, and clean weights into all other norms that had noise.

        Every worker draws the same noise, and skips layers that it does not hold (pipeline parallelism). `names` are
        full layer names. `sigma` is a float as text, because JSON has no NaN. The rest is as in `aqn.Noise`.
        """
        weights = self._qerl_parameters()
        clean: dict[str, Tensor] = self.__dict__.setdefault("qerl_clean", {})  # as loaded
        for name in names:
            if name in weights and name not in clean:
                clean[name] = weights[name].detach().float().clone()
        chosen = {name: clean[name] for name in names if name in clean}
        noisy = CLEAN.onto_norms(clean) | Noise(float(sigma), seed, step, relative).onto_norms(chosen)
        for name, weight in noisy.items():
            weights[name].data.copy_(weight)  # in place, because CUDA graphs read this address
        if torch.cuda.is_available():  # vLLM may sample on another stream than this one
            torch.cuda.synchronize()

    def qerl_norms(self, names: list[str]) -> dict[str, list[str]]:
        """Map each name in `names` that this worker holds to the weights of the norm, as [dtype, base64]."""
        weights = self._qerl_parameters()
        return {name: encode_tensor(weights[name]) for name in names if name in weights}

    def _qerl_parameters(self) -> dict[str, Tensor]:
        """Return all parameters of the model, by layer name without `.weight`."""
        model = self.get_model()
        return {name.removesuffix(".weight"): weight for name, weight in model.named_parameters()}
