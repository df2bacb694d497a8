"""Write checkpoints with random weights: real files of a real architecture, without a download.

Speed does not depend on the weights, as long as logits are finite and no token is certain. The quantize command would
write the same tensors. The tokenizer makes each letter a token.
"""

import math
import random
import string
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from qerl_lab import formats
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.formats.format import PackedAs
from qerl_lab.model.linear import packable_linears
from qerl_lab.model.loading import empty_model, fill, tied_names
from qerl_lab.model.weight_files import Stored, Weights

CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class RandomWeights(Weights):
    """Weights that are made on request instead of read: normal(0, 0.02) matrices, ones for norms, zeros for biases.

    The model is a Qwen2.5 of `architecture`, a value of `bench_options.ARCHITECTURES`, in bfloat16. Tensors are made on
    `device`, seeded by name, so that every format packs the same weights. `linears` names the Linears outside of
    `ignore`, which formats pack.
    """

    def __init__(
        self, architecture: dict[str, Any], device: torch.device, ignore: Sequence[str] = tuple(FormatConfig().ignore)
    ) -> None:
        self.config = Qwen2Config(
            **architecture, architectures=["Qwen2ForCausalLM"], max_position_embeddings=32_768, rope_theta=1e6,
            bos_token_id=None, pad_token_id=0, dtype=torch.bfloat16,
            eos_token_id=None,  # `write` puts the end tokens into the generation config
        )  # fmt: skip
        model = empty_model(self.config, torch.bfloat16)
        of_messages = Path("random weights")
        super().__init__({name: Stored(of_messages, tuple(p.shape), p.dtype) for name, p in model.named_parameters()})
        self.device = device
        self.linears = packable_linears(model, ignore)

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Make the tensor `name` and move it to `device`. The name seeds the random values."""
        tensor = torch.empty(self.shape(name), dtype=torch.bfloat16, device=self.device)
        if tensor.ndim == 1:
            return tensor.fill_(0.0 if name.endswith("bias") else 1.0).to(device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return tensor.normal_(std=0.02, generator=generator).to(device)


def size_of(architecture: dict[str, Any], format_config: FormatConfig) -> float:
    """Return about how many bytes a checkpoint of `architecture` packed by `format_config` has. Makes no tensors."""
    source = RandomWeights(architecture, torch.device("cpu"), format_config.ignore)
    packed = sum(math.prod(source.shape(f"{name}.weight")) for name in source.linears)
    every = sum(math.prod(source.shape(name)) for name in source.names)
    return 2 * (every - packed) + packed * formats.build(format_config).bits_per_weight / 8


def write(
    folder: Path,
    architecture: dict[str, Any],
    format_config: FormatConfig,
    device: torch.device,
    mean_tokens: float = 0,
) -> None:
    """Write a random checkpoint of `architecture`; weights are made on `device`, and packed by `format_config` there.

    `mean_tokens` is the mean length of completions (`end_ids`); with 0 the model never ends a completion.
    """
    weight_format, source = formats.build(format_config), RandomWeights(architecture, device)
    packed_as = PackedAs(weight_format, tuple(format_config.ignore))
    config = source.config
    model = fill(empty_model(config, torch.bfloat16), source, packed_as, is_packed=False, device=device)
    folder.mkdir(parents=True)
    save_torch_state_dict(model.state_dict(), folder, shared_tensors_to_discard=tied_names(model))
    if weight_format.BLOCK is not None:
        config.quantization_config = weight_format.quantization_config(format_config.ignore, torch.bfloat16)
    config.save_pretrained(folder)
    ends = end_ids(architecture["vocab_size"], mean_tokens)
    GenerationConfig(eos_token_id=ends, pad_token_id=0).save_pretrained(folder)
    tokenizer_of(architecture["vocab_size"]).save_pretrained(folder)


def end_ids(vocabulary: int, mean_tokens: float) -> list[int]:
    """Choose the token ids that end a completion so that its mean length is `mean_tokens`; 0 lets none end early.

    The first id is `vocabulary`, the number of tokens, which is never sampled. A share 1 / `mean_tokens` of the
    vocabulary follows, the same at each call. Random logits are nearly uniform, so each sampled token ends the
    completion with that probability, and lengths are geometric.
    """
    count = round(vocabulary / mean_tokens) if mean_tokens else 0
    drawn = torch.randperm(vocabulary - 1, generator=torch.Generator().manual_seed(0))[:count] + 1  # token 0 pads
    return [vocabulary, *sorted(drawn.tolist())]


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per letter. Token 0 pads; the end token lies beyond the vocabulary.

    It is byte-level BPE without merges, because transformers reads every Qwen2 tokenizer as BPE.
    """
    alphabet = sorted(ByteLevel.alphabet())
    words = ["<pad>", *alphabet, *(f"w{index}" for index in range(len(alphabet) + 1, vocabulary)), "<end>"]
    tokenizer = Tokenizer(BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=CHAT, padding_side="left"
    )


def prompt_ids(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return `count` prompts of `length` random tokens, seeded."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (count, length), generator=generator).tolist()


def prompt_texts(count: int, length: int) -> list[str]:
    """Return `count` texts of `length` random letters; each letter is one token of `tokenizer_of`."""
    letters = random.Random(0)
    return ["".join(letters.choices(string.ascii_letters, k=length)) for _ in range(count)]


def plain_lora(rank: int) -> LoraConfig:
    """Return PEFT's configuration of an adapter on the layers that the lab adapts by default, with scaling 1."""
    targets = list(RunConfig().lora.target_modules)
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, task_type="CAUSAL_LM")


def write_adapter(folder: Path, architecture: dict[str, Any], rank: int) -> None:
    """Write a random adapter for all Linears that formats pack, in PEFT's format.

    The product of the two matrices of a Linear is small, but not zero.
    """
    base = RandomWeights(architecture, torch.device("cpu"))
    generator, tensors = torch.Generator().manual_seed(rank), dict[str, Tensor]()
    for name in base.linears:
        rows, columns = base.shape(f"{name}.weight")
        for part, shape in (("lora_A", (rank, columns)), ("lora_B", (rows, rank))):
            values = torch.randn(shape, generator=generator) / math.sqrt(100 * shape[1])
            tensors[f"base_model.model.{name}.{part}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS)
    plain_lora(rank).save_pretrained(folder)
