"""Put all weights of the policy into vLLM, in place, where a run trains all of them (lora=full). Imports no vllm."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import all_weights


class AllWeights:
    """All weights, which vLLM's model loads as it loads a checkpoint: it fuses q/k/v and gate/up, and rounds to bf16.

    It copies them into the tensors that it has, whose addresses CUDA graphs read.
    """

    request = None

    def __init__(self, model: PreTrainedModel, cfg: RunConfig) -> None:
        self.model, self.path = model, cfg.model.path

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """Return no arguments of `vllm.LLM`, because its model is that of `folder` as it stands."""
        return {}

    def begin(self, llm: Any) -> None:
        """Do nothing: unlike an adapter, all weights need no buffers in a started vLLM."""

    def sync(self, llm: Any) -> None:
        """Copy the policy's weights into vLLM's model. Raises ConfigError, at the first sync, if that has others."""
        llm.apply_model(self._load)

    def _load(self, model: Any) -> None:
        """Load the policy's weights into vLLM's `model`. Raises AssertionError if one of its tensors has moved."""
        addresses = {name: weight.data_ptr() for name, weight in model.named_parameters()}
        try:
            loaded = model.load_weights(all_weights.weights(self.model).items())
            missing = sorted(addresses.keys() - loaded)
        except ValueError as error:
            missing = [first_line(error)]
        if missing:
            raise ConfigError(
                f"vLLM cannot take all weights of model.path={self.path} from the trainer, because its model has "
                f"others ({missing[0]}). Type rollout=transformers, or lora=rank32."
            )
        if addresses != {name: weight.data_ptr() for name, weight in model.named_parameters()}:
            raise AssertionError("vLLM's model has other tensors than when its CUDA graphs were captured")

    def close(self) -> None:
        """Do nothing: the engine holds the weights."""
