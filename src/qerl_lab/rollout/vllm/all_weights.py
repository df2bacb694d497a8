"""Put all weights of the policy into vLLM, in place, where a run trains all of them (lora=full). Imports no vllm."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import all_weights


class AllWeights:
    """Puts all weights of the policy into vLLM through the function with which vLLM's model loads a checkpoint.

    That function fuses q/k/v and gate/up and rounds to the model's dtype. It copies into existing tensors, because CUDA
    graphs contain their addresses.
    """

    request = None

    def __init__(self, model: PreTrainedModel, cfg: RunConfig) -> None:
        self.model, self.path = model, cfg.model.path

    def arguments(self, folder: Path, backend: str) -> dict[str, Any]:
        """Return {}: to load the model in `folder`, `vllm.LLM` needs no further arguments."""
        return {}

    def begin(self, llm: Any) -> None:
        """Do nothing: unlike an adapter, all weights need no buffers in a started vLLM."""

    def sync(self, llm: Any) -> None:
        """Copy the policy's weights into vLLM's model.

        Raises ConfigError if vLLM's model has weights that the policy lacks, or the reverse; the first call shows this.
        """
        llm.apply_model(self._load)

    def _load(self, model: Any) -> None:
        """Load the policy's weights into vLLM's `model`.

        Raises ConfigError if the weights of the two do not match, AssertionError if a tensor of `model` has moved.
        """
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
        """Do nothing: this object holds no memory, and the engine releases vLLM's."""
