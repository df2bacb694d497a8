"""Put all weights of the policy into vLLM, in place, where a run trains all of them (lora=full). Imports no vllm."""

from typing import Any

from transformers import PreTrainedModel

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.model import all_weights


def send(vllm_model: Any, model: PreTrainedModel, path: str) -> None:
    """Copy all weights of the policy's `model` into `vllm_model`, by vLLM's own `load_weights`.

    `load_weights` fuses q/k/v and gate/up, and rounds to the dtype of vLLM's model. It must copy into existing tensors,
    because CUDA graphs contain their addresses.

    Raises ConfigError, which names model.path=`path`, if vLLM's model has other weights. Raises AssertionError if a
    tensor of vLLM's model has moved.
    """
    addresses = {name: weight.data_ptr() for name, weight in vllm_model.named_parameters()}
    try:
        loaded = vllm_model.load_weights(all_weights.weights(model).items())
        missing = sorted(addresses.keys() - loaded)
    except ValueError as error:
        missing = [first_line(error)]
    if missing:
        raise ConfigError(
            f"vLLM cannot take all weights of model.path={path} from the trainer, because its model has others "
            f"({missing[0]}). Type rollout=transformers, or lora=rank32."
        )
    if addresses != {name: weight.data_ptr() for name, weight in vllm_model.named_parameters()}:
        raise AssertionError("vLLM's model has other tensors than when its CUDA graphs were captured")
