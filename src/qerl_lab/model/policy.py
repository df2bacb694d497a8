"""The policy: a frozen packed base with trainable LoRA adapters, or all weights trainable; and norms that get noise."""

import shlex
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from qerl_lab import formats
from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import spell_list
from qerl_lab.formats.format import PackedAs
from qerl_lab.model import all_weights, loading
from qerl_lab.model.chat import Chat, load_tokenizer, pad_id
from qerl_lab.model.linear import packable_linears, packed_head, packed_layers
from qerl_lab.model.lora import register_lora
from qerl_lab.model.on_disk import HEAD, packed_head_refusal, require_same_format
from qerl_lab.model.weight_files import WeightFiles, loading_error, local_folder
from qerl_lab.system.disk import make_readable


@dataclass
class Policy:
    """The model that trainer and engine share.

    Attributes:
        model: the base with its adapter, or the base itself if all of its weights are trained.
        norms: the norm weights that get noise, in float32, by full layer name.
        clean_norms: the same weights without noise: copies, or with lora=full the trained memory itself.
        autocast: dtype in which a model with float32 master weights computes; None for a model with an adapter.
    """

    model: PeftModel | PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    norms: dict[str, nn.Parameter]
    clean_norms: dict[str, Tensor]
    autocast: torch.dtype | None = None

    @property
    def base(self) -> PreTrainedModel:
        """Return the transformers model without PEFT's wrapper. Its layers contain the adapter, if there is one."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def trains_all(self) -> bool:
        """Tell whether all weights of the model are trained, instead of an adapter."""
        return not isinstance(self.model, PeftModel)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype that the policy computes in. Engines hold its weights in the same dtype."""
        return self.autocast or self.model.dtype

    @property
    def adapter_is_off(self) -> bool:
        """Tell whether the policy has an adapter and it is disabled, so that the policy computes as its base."""
        return isinstance(self.model, PeftModel) and not self.model.get_model_status().enabled

    @property
    def device(self) -> torch.device:
        """Return the device that holds the policy."""
        return self.base.device

    @property
    def base_dropout(self) -> dict[str, float]:
        """Return the dropout rates above 0 in the base's config, by key: each key with "drop" in its name.

        A key counts even if the model does not use it.
        """
        rates = self.model.config.to_dict().items()
        return {key: rate for key, rate in rates if "drop" in key and isinstance(rate, int | float) and rate > 0}

    @property
    def uses_dropout(self) -> bool:
        """Tell whether training uses dropout: the adapter does, or `base_dropout` has a rate."""
        if isinstance(self.model, PeftModel) and self.model.peft_config["default"].lora_dropout > 0:
            return True
        return bool(self.base_dropout)

    def autocasting(self) -> AbstractContextManager[object]:
        """Return a context manager that autocasts float32 master weights to `dtype`; with an adapter it does nothing.

        Not needed in the Trainer, which autocasts its forward passes.
        """
        return nullcontext() if self.dtype == self.model.dtype else torch.autocast(self.device.type, self.dtype)

    @contextmanager
    def norms_as(self, weights: dict[str, Tensor]) -> Iterator[None]:
        """Context manager: compute with `weights` in place of `norms`, then put the old weights back.

        `weights` has a tensor for each name in `norms`; nothing is copied.
        """
        before = {name: norm.data for name, norm in self.norms.items()}
        try:
            for name, norm in self.norms.items():
                norm.data = weights[name]
            yield
        finally:
            for name, norm in self.norms.items():
                norm.data = before[name]

    @contextmanager
    def as_sampler(self, norms: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Context manager: compute with `norms` as norm weights, without dropout and gradients.

        `norms` has a tensor for each name in the attribute `norms`; None keeps the weights that the norms have now.
        Computes in the policy's dtype.
        """
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), self.autocasting(), nullcontext() if norms is None else self.norms_as(norms):
                yield
        finally:
            self.model.train(training)

    def save_trained(self, folder: Path) -> None:
        """Save the adapter in PEFT's layout to `folder`, or with lora=full all weights in float32."""
        if isinstance(self.model, PeftModel):
            save_adapter(self.model, folder)
        else:
            all_weights.save(self.model, folder)

    def load_trained(self, folder: Path) -> None:
        """Load in place what `save_trained` wrote to `folder`. Raises ConfigError if an adapter cannot be used."""
        if isinstance(self.model, PeftModel):
            load_adapter(self.model, folder)
        else:
            all_weights.load(self.model, folder)

    @cached_property
    def chat(self) -> Chat:
        """Return the renderer of chats with the tokenizer's template."""
        embeddings = self.base.get_input_embeddings().num_embeddings
        return Chat(self.tokenizer, embeddings=embeddings, end_ids=self.end_ids())

    def decode_prompt(self, prompt_ids: list[int]) -> str:
        """Decode a prompt to text, special tokens included."""
        return self.tokenizer.decode(prompt_ids)

    def decode_completion(self, completion_ids: list[int]) -> str:
        """Decode a completion to text, without end and padding tokens.

        Other special tokens stay, because some tokenizers hold words such as `<think>` as a special token.
        """
        dropped = {*self.end_ids(), self.tokenizer.pad_token_id}
        return self.tokenizer.decode([token for token in completion_ids if token not in dropped])

    def end_ids(self) -> list[int]:
        """Return the token ids that end a completion: end tokens of the tokenizer and of the generation config."""
        configured = self.model.generation_config.eos_token_id
        ids = configured if isinstance(configured, list) else [configured]
        return sorted({self.tokenizer.eos_token_id, *ids} - {None})


def device_of(name: str) -> torch.device:
    """Return the torch device for the option `device`: cpu, cuda, or auto, which takes a GPU if there is one.

    Raises ConfigError for cuda without a GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device=cuda was given and torch sees no GPU here. Type device=cpu, or device=auto.")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def compute_dtype(cfg: RunConfig, device: torch.device) -> torch.dtype:
    """Return the dtype that cfg.model.dtype names; auto is bfloat16 on a GPU, float32 on a CPU."""
    if cfg.model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, cfg.model.dtype)


def build(cfg: RunConfig, device: torch.device, *, fits_names: bool = False) -> Policy:
    """Build the policy: load the base, pack its Linears, find the norms that get noise, attach new adapters.

    The adapters are initialized from cfg.seed. With lora=full there are none, and all weights of the base are trained.
    With `fits_names`, cfg.aqn.norms and cfg.lora.target_modules are first changed to names that the base has
    (`fitting_norms`, `fitting_targets`). This is for commands in which the user cannot type them. Build the engine from
    the changed `cfg`, because vLLM holds in float32 the norms that `cfg` names.

    Raises ConfigError if the model cannot be loaded, computes padding into its state, or lacks a module that `cfg`
    names, or if a norm of aqn.norms feeds no linear layer.
    """
    base, tokenizer = load_base(cfg, device)
    if base._is_stateful and _reads_padding(base):  # attention masks padding, and so do most recurrent layers
        raise ConfigError(
            f"model.path={cfg.model.path}: in {type(base).__name__} the padding before a prompt changes the log-probs "
            "of its completion; allowed: models that mask padding. Type another model."
        )
    if fits_names:
        cfg.aqn.norms = fitting_norms(base, cfg.aqn.norms)
        cfg.lora.target_modules = fitting_targets(base, cfg.lora.target_modules, cfg.model.path)
    norms = {name: hold_in_float32(norm) for name, norm in noisy_norms(base, cfg.aqn.norms, cfg.model.path).items()}
    if cfg.trains_all:
        dtype = base.dtype
        all_weights.make_trainable(base, dtype)
        return Policy(base, tokenizer, norms, {name: norm.detach() for name, norm in norms.items()}, dtype)
    model = attach_adapters(base, cfg)
    clean = {name: norm.detach().clone() for name, norm in norms.items()}
    return Policy(model, tokenizer, norms, clean)


@torch.enable_grad()
def _reads_padding(model: PreTrainedModel) -> bool:
    """Tell whether a masked token before another changes the result of `model`, as in RWKV and RecurrentGemma.

    It does not if the gradient of the result by its embedding is exactly 0.
    """
    size, device = model.get_input_embeddings().embedding_dim, model.device
    embeddings = torch.linspace(-1, 1, 2 * size, dtype=model.dtype, device=device).view(1, 2, size).requires_grad_()
    mask = torch.tensor([[0, 1]], device=device)
    logits = model(inputs_embeds=embeddings, attention_mask=mask, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits[0, 1].sum(), embeddings)
    return bool(gradient[0, 0].any())


def noisy_norms(model: PreTrainedModel, names: Sequence[str], path: str) -> dict[str, nn.Module]:
    """Return the modules that get noise, by full name. `names` are last parts of names, e.g. `input_layernorm`.

    The paper adds noise to norms that feed linear layers: q, k, v, and gate, up. Their names differ between models: in
    Gemma 2 `post_attention_layernorm` follows the attention, and `pre_feedforward_layernorm` feeds gate and up.

    Raises ConfigError if a name in `names` fits no module, or fits a module that feeds no linear layer or cannot be
    held in float32. `path` is model.path, for the message.
    """
    norms = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in names}
    feeding = _norms_before_linears(model)
    missing = sorted(set(names) - {name.rpartition(".")[2] for name in norms})
    if wrong := [*missing, *(name for name in norms if name not in feeding)]:
        allowed = _unambiguous_names(feeding, model)
        remedy = f"aqn.norms={spell_list(allowed)}"
        if not allowed:
            remedy = ("" if model.dtype == torch.float32 else "model.dtype=float32, or ") + "aqn=off aqn.norms=[]"
        raise ConfigError(
            f"aqn.norms={spell_list(names)}: in {path} {wrong[0]} feeds no linear layer, or has a bias and is not "
            "float32, and noise belongs on the norms before q, k, v and gate, up; allowed: "
            f"{', '.join(allowed) or 'none of this model'}. Type {remedy}."
        )
    return norms


def fitting_norms(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Choose the norms for noise: `names` if all of them feed a linear layer, else all norms of `model` that feed one.

    Names are last parts, e.g. `input_layernorm`. Returns [] if no norm feeds a linear layer, as in OLMo 2.
    """
    allowed = _unambiguous_names(_norms_before_linears(model), model)
    return list(names) if {*allowed}.issuperset(names) else allowed


def fitting_targets(model: PreTrainedModel, names: Sequence[str], path: str) -> list[str]:
    """Choose the Linears for LoRA: `names` if `model` has one of them, else all of its Linears but the output layer.

    Names are last parts, e.g. `q_proj`. Raises ConfigError if the output layer is the only Linear. `path` is
    model.path, for the message.
    """
    linears = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if linears <= {HEAD}:
        raise ConfigError(f"model.path={path} has no torch.nn.Linear but its output layer. Type another model.")
    return list(names) if linears.intersection(names) else sorted(linears - {HEAD})


def _unambiguous_names(modules: Collection[str], model: PreTrainedModel) -> list[str]:
    """Shorten the full names `modules` to their last parts, and sort them; leave out those that fit other modules too.

    For example, in OPT `final_layer_norm` is a norm before a linear layer in each block, and also the last norm of all.
    """
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in modules}
    return sorted({name.rpartition(".")[2] for name in modules} - others)


@torch.no_grad()
def _norms_before_linears(model: PreTrainedModel) -> set[str]:
    """Run one token through `model`; return the full names of the norms that feed a Linear and can be held in float32.

    torch computes a norm with a bias in one dtype, so that its weight alone cannot be float32 (`hold_in_float32`).
    """
    written: dict[str, Tensor] = {}  # keep the tensors alive, so that no address is reused
    read: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):  # first: to read the weight of a packed one would unpack it
            hooks.append(module.register_forward_pre_hook(lambda _, args: read.append(args[0])))
            continue
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        if isinstance(weight, nn.Parameter) and weight.dim() == 1 and (bias is None or weight.dtype == torch.float32):
            hooks.append(module.register_forward_hook(lambda _, __, output, name=name: written.update({name: output})))
    model.base_model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    addresses = {tensor.data_ptr() for tensor in read}
    return {name for name, output in written.items() if output.data_ptr() in addresses}


def hold_in_float32(norm: nn.Module) -> nn.Parameter:
    """Convert the weight of `norm` to float32 in place and return it. The norm still returns the dtype of its input.

    In bfloat16 a weight between 1 and 2 has steps of 0.0078, too coarse for a small sigma. Without noise the output
    keeps its bits: the float32 product of two bfloat16 numbers is exact and so rounded once, like the bfloat16 product.
    """
    weight = norm.get_parameter("weight")
    if weight.dtype != torch.float32:
        weight.data = weight.data.float()
        norm.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
    return weight


def load_base(cfg: RunConfig, device: torch.device) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the frozen base of model.path in the run's format on `device`, and its tokenizer.

    A dense model is packed while it is read; a packed model must have the format and ignored layers of `cfg`. Reads
    safetensors only and runs no code of the model. Raises ConfigError for a model that cannot be loaded or does not fit
    `cfg`.
    """
    if cfg.format.name not in formats.FORMATS:  # an option in conf/format alone: the model is not to blame
        raise ConfigError(
            f"format={cfg.format.name} has no class in FORMATS of src/qerl_lab/formats/__init__.py; it has "
            f"{', '.join(formats.FORMATS)}. Add the class there, or type for example format=nvfp4."
        )
    folder = local_folder(cfg.model.path, cfg.model.revision)
    try:
        tokenizer = load_tokenizer(folder, padding_side="left")
        stored = loading.stored_as(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model = loading.empty_model(config, compute_dtype(cfg, device), cfg.model.attention)
        packed_as = stored or PackedAs(formats.build(cfg.format), tuple(cfg.format.ignore))
        _check_packed_layers(cfg, model, packed_as, is_packed=stored is not None)
        loading.fill(model, WeightFiles(folder), packed_as, is_packed=stored is not None, device=device)
        # Keep end tokens only: transformers would add the model's sampling defaults (Qwen2.5's repetition penalty).
        has_file = (folder / "generation_config.json").is_file()
        generation = GenerationConfig.from_pretrained(folder) if has_file else model.generation_config
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise loading_error(f"model.path={cfg.model.path}", error) from error
    model.generation_config = GenerationConfig(eos_token_id=generation.eos_token_id)
    for layer in packed_layers(model).values():
        layer.dense_cache = device.type == "cpu" and cfg.format.dense_cache != "off"
    if pad_id(tokenizer, model.get_input_embeddings().num_embeddings) != tokenizer.pad_token_id:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def _check_packed_layers(cfg: RunConfig, model: PreTrainedModel, packed_as: PackedAs, *, is_packed: bool) -> None:
    """Raise ConfigError if the output layer is or would be packed, or a packed model does not fit cfg.format.

    `packed_as` describes the model as it is (`is_packed`) or as it will be packed. A packed model must have the format,
    rounding rules and ignored layers of cfg.format.
    """
    name = packed_as.weight_format.NAME
    if head := packed_head(model, packed_as.weight_format, packed_as.ignore):
        if not is_packed:
            raise packed_head_refusal(cfg, head)
        raise ConfigError(
            f"model.path={cfg.model.path} has {head} packed, and the loss reads the dense weight of {head}, the output "
            f"layer. Type the path of the dense model, or of one that was quantized with ignore=[{head}]."
        )
    if not is_packed:
        return
    rules = {key: value for key, value in asdict(packed_as.weight_format).items() if value is not None}
    require_same_format(cfg, name, rules)
    of_run, of_model = ({*packable_linears(model, ignore)} for ignore in (cfg.format.ignore, packed_as.ignore))
    if differ := of_run ^ of_model:
        remedy = shlex.quote(f"format.ignore={spell_list(packed_as.ignore)}")
        raise ConfigError(
            f"model.path={cfg.model.path} is packed in {name} with ignore={list(packed_as.ignore)}, and this run has "
            f"format.ignore={cfg.format.ignore}: they differ in {len(differ)} layers, the first {min(differ)}. "
            f"Type {remedy}."
        )


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the model's adapter to `folder` in PEFT's layout, with the folder's read and write permissions."""
    model.save_pretrained(folder)
    make_readable([folder / WEIGHTS])


def adapter_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the adapter's matrices from `folder`, by PEFT's names. Raises ConfigError if the file cannot be read."""
    try:
        return load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        problem = f"the adapter {folder / WEIGHTS} cannot be read ({in_one_line(error)})"
        raise ConfigError(f"{problem}. Put the file back as it was.") from error


def load_adapter(model: PeftModel, folder: Path) -> None:
    """Load the adapter in `folder` into the model, in place.

    Raises ConfigError if the file cannot be read, or its matrices differ in names or shapes from the model's adapter.
    """
    tensors = adapter_tensors(folder)
    expected = {name: tuple(tensor.shape) for name, tensor in get_peft_model_state_dict(model).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if differ := sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name)):
        name = differ[0]
        raise ConfigError(
            f"the adapter in {folder} is of another model or rank: {len(differ)} matrices differ, the first {name}, "
            f"{found.get(name, 'missing')} there and {expected.get(name, 'missing')} in the model. Check model.path."
        )
    set_peft_model_state_dict(model, tensors)


def attach_adapters(base: PreTrainedModel, cfg: RunConfig) -> PeftModel:
    """Attach new float32 LoRA adapters to `base` as cfg.lora says, initialized from cfg.seed alone."""
    lora = PeftLoraConfig(
        r=cfg.lora.rank, lora_alpha=cfg.lora.alpha or cfg.lora.rank, lora_dropout=cfg.lora.dropout,
        target_modules=list(cfg.lora.target_modules), task_type="CAUSAL_LM",
    )  # fmt: skip
    register_lora(lora)
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        return get_peft_model(base, lora)
