"""The policy: a frozen base in few bits, LoRA adapters that learn, and the norms that carry noise."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from qerl_lab import formats
from qerl_lab.config import ConfigError, ModelConfig, RunConfig

POCKET = Path(__file__).parent / "assets" / "pocket"


@dataclass
class Policy:
    """What a trainer and an engine share. `norms` are the weights that carry noise, by the full name of their layer;
    `clean_norms` are float32 copies of them."""

    model: PeftModel
    tokenizer: PreTrainedTokenizerBase
    norms: dict[str, nn.Parameter]
    clean_norms: dict[str, Tensor]

    @property
    def device(self) -> torch.device:
        return next(iter(self.clean_norms.values())).device

    @contextmanager
    def norms_as(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Swap the norms' weights for others (by name) for a while. Pointers move, nothing is copied."""
        own = {name: norm.data for name, norm in self.norms.items()}
        try:
            for name, norm in self.norms.items():
                norm.data = weights[name]
            yield
        finally:
            for name, norm in self.norms.items():
                norm.data = own[name]

    def prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a chat, up to where the answer begins."""
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]

    def decode(self, completion_ids: list[int]) -> str:
        return self.tokenizer.decode(completion_ids, skip_special_tokens=True)

    def end_ids(self) -> list[int]:
        """Token ids that end a completion: the tokenizer's and the generation config's."""
        configured = self.model.generation_config.eos_token_id or []
        return sorted({self.tokenizer.eos_token_id, *(configured if isinstance(configured, list) else [configured])})


def device_of(name: str) -> torch.device:
    """The device that `device=` asks for. Raises ConfigError where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda was given and torch sees no GPU here. Type device=cpu, or device=auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build(cfg: RunConfig, device: torch.device) -> Policy:
    """Load the base, pack its Linears, attach fresh adapters (seeded), find the norms.

    Raises:
        ConfigError: the model cannot be loaded, or has no module of a configured name.
    """
    base, tokenizer = load_base(cfg.model, device)
    if device.type == "cuda" and cfg.format.dense_cache == "on":
        raise ConfigError(
            "format.dense_cache=on is refused on a GPU, which device=auto found. Type format.dense_cache=off."
        )
    formats.pack_model(
        base, cfg.format.name, ignore=tuple(cfg.format.ignore),
        dense_cache=device.type == "cpu" and cfg.format.dense_cache != "off",
        options=format_options(cfg),
    )  # fmt: skip
    norms = {
        name: module.get_parameter("weight") for name, module in base.named_modules()
        if name.rpartition(".")[2] in cfg.aqn.norms
    }  # fmt: skip
    if missing := set(cfg.aqn.norms) - {name.rpartition(".")[2] for name in norms}:
        raise ConfigError(f"aqn.norms={cfg.aqn.norms}: {cfg.model.path} has no module named {sorted(missing)}.")
    model = attach_adapters(base, cfg)
    clean = {name: norm.detach().float().clone() for name, norm in norms.items()}
    return Policy(model, tokenizer, norms, clean)


def format_options(cfg: RunConfig) -> dict[str, Any]:
    """What the configuration says to the codec beyond its name."""
    return {option: getattr(cfg.format, option) for option in formats.codec(cfg.format.name).OPTIONS}


def load_base(cfg: ModelConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in its compute dtype on `device`, and its tokenizer. Reads safetensors only; runs no code of the model's.

    Raises ConfigError where the path is neither a local directory nor a model that the hub gives.
    """
    path = str(POCKET) if cfg.path == "pocket" else os.path.expanduser(cfg.path)
    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise ConfigError(f"model.path={path} is no directory. Type model.path=DIRECTORY with config.json in it.")
    dtype = {"auto": torch.bfloat16 if device.type == "cuda" else torch.float32}.get(cfg.dtype) or getattr(
        torch, cfg.dtype
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=cfg.revision, padding_side="left", trust_remote_code=False
        )
        model = AutoModelForCausalLM.from_pretrained(
            path, revision=cfg.revision, dtype=dtype, attn_implementation=cfg.attention, use_safetensors=True,
            trust_remote_code=False,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path={cfg.path} could not be loaded "
            f"({type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}). "
            "Allowed: pocket, a local directory with safetensors weights and a tokenizer, or a reachable hub id."
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    # transformers would add a model's own sampling defaults (Qwen2.5's repetition penalty, say) to what a run asks for.
    model.generation_config = GenerationConfig(eos_token_id=model.generation_config.eos_token_id)
    return model.to(device).requires_grad_(False), tokenizer


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter that learns. TRL's copy of it for the KL term stays out: with it in a subfolder, a resume by
    transformers would load the subfolders alone."""
    model.save_pretrained(folder, selected_adapters=["default"])


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Give the model the adapter that `folder` holds (adapter_model.safetensors), in place."""
    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


def attach_adapters(base: PreTrainedModel, cfg: RunConfig) -> PeftModel:
    """Adapters in float32 on `lora.target_modules`, initialized from the run's seed alone."""
    lora = PeftLoraConfig(
        r=cfg.lora.rank, lora_alpha=cfg.lora.alpha or cfg.lora.rank, lora_dropout=cfg.lora.dropout,
        target_modules=list(cfg.lora.target_modules), task_type="CAUSAL_LM",
    )  # fmt: skip
    formats.register_packed(lora)
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        try:
            return get_peft_model(base, lora)
        except ValueError as error:  # PEFT found none of the target modules
            raise ConfigError(f"lora.target_modules={cfg.lora.target_modules}: {error}") from error
