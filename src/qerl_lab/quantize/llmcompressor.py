"""AWQ (arXiv 2306.00978) and GPTQ (arXiv 2210.17323) through llmcompressor 0.14, weights only.

- awq: `AWQModifier` searches, per group of layers that share an input, the scales of input channels that change the
  group's output least. It moves them from the weights into the preceding norm or layer, then rounds to nearest.
- gptq: `GPTQModifier` rounds column by column and compensates each error in the following columns. Each layer is
  calibrated on the outputs of the quantized layers before it.

Both keep one layer at a time on the accelerator. llmcompressor sets scales by the formats' default rules and gives
q/k/v and gate/up one NVFP4 global scale; `formats.recognize` reads its output. AWQ changes norm weights, so the same
AQN sigma is a different noise afterwards.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig

from qerl_lab.config.option import ConfigError
from qerl_lab.model.chat import load_tokenizer
from qerl_lab.model.loading import load_by_transformers
from qerl_lab.quantize import calibration
from qerl_lab.quantize.quantize_options import SCHEMES, QuantizeOptions

if TYPE_CHECKING:
    from llmcompressor.modifiers import Modifier


def run(options: QuantizeOptions, source: Path, left_dense: list[str], folder: Path) -> None:
    """Quantize the model in `source` by AWQ or GPTQ; write weights and config files to `folder`. Call `check` first.

    `left_dense` are full names of the Linears that stay dense. Raises ConfigError if the dataset has too little text,
    or `tokens` is longer than the model's context; ValueError if the model lacks a weight, or a layer does not divide
    into blocks.
    """
    longest = getattr(AutoConfig.from_pretrained(source, trust_remote_code=False), "max_position_embeddings", None)
    if longest is not None and options.tokens > longest:
        raise ConfigError(
            f"tokens={options.tokens} is more than model={options.model} can read. Type tokens={longest}."
        )
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from loguru import logger

    logger.remove()  # llmcompressor logs a line per layer, its metrics above the level of a warning
    logger.add(sys.stderr, level="WARNING", filter=lambda record: record["level"].name != "METRIC")
    tokenizer = load_tokenizer(source)
    data = calibration.sequences(
        options.dataset, tokenizer, samples=options.samples, tokens=options.tokens, seed=options.seed
    )
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in data]
    batches = DataLoader(cast(Dataset, rows), batch_size=1)
    model = load_by_transformers(source, "auto")
    arguments: dict[str, Any] = {"targets": "Linear", "scheme": SCHEMES[options.format], "ignore": left_dense}
    is_gptq = options.method == "gptq"
    recipe = [GPTQModifier(**arguments)] if is_gptq else [_awq_modifier(), QuantizationModifier(**arguments)]
    oneshot(model=model, processor=tokenizer, recipe=recipe, dataset=batches)
    model.save_pretrained(folder, save_compressed=True, max_shard_size=int(options.shard_gb * 1e9))


def check(options: QuantizeOptions) -> None:
    """Raise ConfigError if llmcompressor is not installed, or if it would use a GPU despite device=cpu."""
    if importlib.util.find_spec("llmcompressor") is None:
        raise ConfigError(
            f"method={options.method} needs llmcompressor, which is not installed here. It is in the extra `quantize`, "
            "which wants a virtual environment of its own: llmcompressor 0.14 pins compressed-tensors 0.19, vLLM pins "
            "0.17. Type make quantize-env, then this command with .venv-quantize/bin/python."
        )
    if options.device == "cpu" and torch.accelerator.is_available():
        raise ConfigError(
            f"device=cpu with method={options.method}: llmcompressor takes the GPU if it sees one. "
            "Put CUDA_VISIBLE_DEVICES= before the command, or type device=auto."
        )


def _awq_modifier() -> "Modifier":
    """Return llmcompressor's AWQ modifier; without an accelerator its caches do not pin memory, which needs one."""
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    if torch.accelerator.is_available():
        return AWQModifier()

    class UnpinnedCache(IntermediatesCache):
        def pin_memory(self, batch_index: int, input_names: list[str] | None = None) -> None:
            """Override llmcompressor's hook: do nothing, because pinned memory only speeds copies to an accelerator."""

    class AWQWithoutAccelerator(AWQModifier):
        def on_calibration_start(self, state: Any, event: Any, **kwargs: Any) -> None:
            """Override llmcompressor's hook: start, then replace the caches, which pin memory."""
            super().on_calibration_start(state, event, **kwargs)
            for parent in self._parent_args_cache:
                self._parent_args_cache[parent] = UnpinnedCache(None, self.offload_device)

    return AWQWithoutAccelerator()
