"""Check a local model directory from its files alone, without torch, transformers or loading a tensor.

So a command refuses an unusable model within a moment: before anything starts, or right after a download. `setting` is
what the user typed for the model (`key=value`), for messages.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.model_hash import TOKENIZERS, model_hash, read_safetensors_header
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.records import QUALITY
from qerl_lab.config.schema import DENSE_FORMAT, POCKET, AqnConfig, LoraConfig, RunConfig
from qerl_lab.config.spelling import shell_override, spell_list
from qerl_lab.model import gguf
from qerl_lab.model.adapter_files import SETTINGS as ADAPTER_SETTINGS

ASSETS = Path(__file__).with_name("pocket")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
HEAD = "lm_head"  # output layer of a causal LM; in no file if tied to the embedding
_WEIGHT = re.compile(r"(.*)\.(weight_packed|weight)$")


class Layer(NamedTuple):
    """A module with a weight: its full name, and the shape of its unpacked weight.

    A norm's shape has one axis. For NF4, which stores no shape, `shape` is [N*K/2, 2].
    """

    name: str
    shape: tuple[int, ...]

    @property
    def is_linear(self) -> bool:
        """Tell whether the layer is a Linear: its weight has two axes, and by its name it is no embedding."""
        return len(self.shape) == 2 and not re.search(r"embed|\bwte\b|\bwpe\b", self.name)


def local_path(path: str, key: str = "model.path") -> Path | None:
    """Return the local directory of the model `path`; None for a hub id OWNER/NAME or a GGUF file not yet unpacked.

    `pocket` is the model that comes with the lab. Raises ConfigError if `path` is none of these, or a GGUF file that
    does not exist; the message names the config key `key`.
    """
    if path == POCKET:
        return ASSETS
    folder = Path(path).expanduser()
    if gguf.is_gguf(path) and not folder.is_dir():
        unpacked = gguf.unpacked_folder(gguf.existing_file(path, key))
        return unpacked if unpacked.is_dir() else None
    if folder.is_dir():
        return folder
    if folder.is_file() or path.startswith(("/", ".", "~")) or not re.fullmatch(r"[\w.-]+/[\w.-]+", path):
        example = shell_override(key, folder.parent) if folder.is_file() else f"{key}=DIRECTORY"
        raise ConfigError(
            f"{key}={path} is no directory; allowed: pocket, a directory, FILE.gguf, or a hub id such as "
            f"Qwen/Qwen2.5-7B-Instruct. Type {example}."
        )
    return None


def is_on_hub(path: str) -> bool:
    """Tell whether the model `path` is a hub id. Raises ConfigError if it is neither that nor a local model."""
    return local_path(path) is None and not gguf.is_gguf(path)


def check_content(cfg: RunConfig) -> None:
    """Raise ConfigError if the model at model.path is gone, or its hash is not cfg.model.hash.

    cfg.model.hash was set when the run was composed; None checks nothing.
    """
    if cfg.model.hash is None:
        return
    path = Path(cfg.model.path)
    recorded = f"model.path={path} was the model of model.hash={cfg.model.hash} when the run was composed"
    if not path.exists():
        raise ConfigError(f"{recorded}, and is gone. Put that model there; a link to it will do.")
    if (found := model_hash(path)) != cfg.model.hash:
        raise ConfigError(f"{recorded}, and is now the model of {found}. Put it back as it was, or start a new run.")


def check(folder: Path, cfg: RunConfig) -> None:
    """Raise ConfigError if the model in `folder` is incomplete or does not fit `cfg`, judged by its files alone."""
    setting = f"model.path={cfg.model.path}"
    check_chat_model(folder, setting)
    model_layers = layers(folder)
    _check_layer_names(model_layers, cfg, setting)
    config = read_model_json(folder / "config.json", setting)
    is_dense, is_tied = "quantization_config" not in config, config.get("tie_word_embeddings") is not False
    name, rules = noted_format(folder)
    if name and not is_dense:  # checkpoints of other programs are compared when they are loaded
        require_same_format(cfg, name, rules)
    if is_dense and not is_tied and cfg.format.name != DENSE_FORMAT and not is_ignored(HEAD, cfg.format.ignore):
        raise packed_head_refusal(cfg, HEAD)
    check_context(config, cfg, setting)


def noted_format(folder: Path) -> tuple[str, dict[str, Any]]:
    """Return format name and format options of a checkpoint that the quantize command wrote, from its quality.json.

    Without quality.json returns ("", {}).
    """
    file = folder / QUALITY
    about = read_model_json(file) if file.is_file() else {}
    return about.get("format", ""), about.get("options", {})


def require_same_format(cfg: RunConfig, name: str, rules: Mapping[str, Any]) -> None:
    """Raise ConfigError unless cfg.format is the format in which the model at model.path is packed.

    `name` is the name of the model's format; `rules` has its options, such as scale_rule, by name.
    """
    packing = f"model.path={cfg.model.path} is packed in {name}"
    if name != cfg.format.name:
        arms = f"an experiment with that format, for example +experiment={name}, "
        raise ConfigError(
            f"{packing}, and this run has format.name={cfg.format.name}. Type format={name}, "
            f"{arms if name in choices_of('experiment') else ''}or the path of the dense model."
        )
    for key, value in rules.items():
        if (given := getattr(cfg.format, key)) != value:
            raise ConfigError(
                f"{packing} with {key}={value}, and this run has format.{key}={given}. "
                f"Type format.{key}={str(value).lower()}."
            )


def packed_head_refusal(cfg: RunConfig, head: str) -> ConfigError:
    """Return the ConfigError for a run that would pack the output layer `head`; the caller raises it."""
    remedy = shlex.quote(f"format.ignore={spell_list([*cfg.format.ignore, head])}")
    return ConfigError(
        f"format.ignore={cfg.format.ignore} would pack {head} in {cfg.format.name}, and the loss reads the dense "
        f"weight of {head}, the output layer; allowed: lists that name it. Type {remedy}."
    )


def check_files(folder: Path, setting: str) -> None:
    """Raise ConfigError if `folder` holds no causal LM, lacks weights or tokenizer, or has two sets of weights.

    transformers would load a BERT as a causal LM too. `setting` (`key=value`) is how the user named the model.
    """
    config = read_model_json(folder / "config.json", setting)
    kind = ", ".join(config.get("architectures") or [])
    if config.get("is_encoder_decoder") or (kind and not re.search("CausalLM|LMHead|ConditionalGeneration", kind)):
        raise ConfigError(
            f"{setting} is {kind or 'an encoder-decoder'} by config.json; allowed: a causal LM. Type the path of one."
        )
    names = {path.name for path in folder.iterdir()}
    list_weight_files(folder)
    if not names & {INDEX, SINGLE}:
        raise ConfigError(
            f"{setting} holds no weights in safetensors; allowed: {SINGLE}, or {INDEX} and its files (other kinds can "
            "run code). Type the path of a model that was saved as safetensors."
        )
    if not names & set(TOKENIZERS):
        raise ConfigError(f"{setting} holds no tokenizer; allowed: tokenizer.json beside the weights. Copy it there.")


def list_weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files of `folder`: the files in its index, or without index model.safetensors, even if missing.

    Raises ConfigError for an unreadable index, and for model.safetensors beside an index of other files, because the
    lab would read those files and transformers model.safetensors. Raises it for an adapter beside the weights too,
    because transformers would add it, a second time if it was merged, and the lab would not.
    """
    if (folder / ADAPTER_SETTINGS).is_file():
        raise ConfigError(
            f"{folder} holds the adapter of {ADAPTER_SETTINGS} beside the weights of a model; allowed: the weights "
            "alone. Move the adapter away if it is merged into them, or is not wanted; else merge it first."
        )
    index = folder / INDEX
    if not index.is_file():
        return (folder / SINGLE,)
    weight_map = read_model_json(index, str(folder)).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(file)).name != file for file in weight_map.values()):
        raise ConfigError(f"{index} has no weight_map to files of the same folder. Download or save the model again.")
    if (folder / SINGLE).is_file() and {*weight_map.values()} != {SINGLE}:
        raise ConfigError(
            f"{folder} holds {SINGLE}, and {INDEX}, which lists other files: two sets of weights. Remove the set that "
            "is not the model."
        )
    return tuple(sorted(folder / file for file in {*weight_map.values()}))


def read_model_json(file: Path, setting: str | None = None) -> dict[str, Any]:
    """Read `file` of a model directory, which must hold a JSON object.

    Raises ConfigError if the file is missing, unreadable, or holds anything else. `setting` (`key=value`) is how the
    user named the model; None names the directory instead.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict):
            return content
    except FileNotFoundError:
        raise ConfigError(
            f"{setting or file.parent} holds no {file.name}, so it is no model directory. Type one that has it."
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON ({error}). Download or save the model again.") from None
    raise ConfigError(f"{file} holds no JSON object. Download or save the model again.")


def check_chat_model(folder: Path, setting: str) -> None:
    """Raise ConfigError if `folder` is no whole model (`check_files`), or has no chat template."""
    check_files(folder, setting)
    # Not chat_template.json, which transformers reads for processors only.
    if (folder / "chat_template.jinja").exists():
        return
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or not read_model_json(settings, setting).get("chat_template"):
        raise ConfigError(
            f"{setting} has no chat template, and questions are asked as a chat; allowed: chat_template.jinja, or "
            "chat_template in tokenizer_config.json. Type an instruction-tuned model, or a directory with a template."
        )


def context_tokens(config: dict[str, Any]) -> int | None:
    """Return the model's context length in tokens from `config`, its config.json; None if not given there.

    If config.json states the length before rope scaling (linear, dynamic, yarn), the scaling is not counted.

    A model with LongRoPE (Phi 3.5, Phi 4 mini) has two sets of rotary frequencies, for texts up to its original context
    and for longer ones. Only the original context counts, because transformers chooses the set by the longest text of a
    batch and vLLM by `max_model_len`: with longer texts sampler and trainer would compute two policies.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):  # su: Phi 3's first name of it
        config = config | rope
        return config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    return config.get("max_position_embeddings")


def cache_bytes_per_token(config: Mapping[str, Any], element_bytes: int) -> int:
    """Return the bytes that one token's keys and values take in all layers together.

    `config` is the model's config.json, `element_bytes` the bytes of one number in the cache.
    """
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    return 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim * element_bytes


def check_context(config: dict[str, Any], cfg: RunConfig, setting: str, group: str = "rollout.") -> None:
    """Raise ConfigError if prompt and completion can exceed the context of `config`, the model's config.json.

    `group` is what users type before the keys of the two lengths.
    """
    prompt, completion = cfg.rollout.max_prompt_tokens, cfg.rollout.max_completion_tokens
    context = context_tokens(config)
    if context is None or prompt + completion <= context:
        return
    shorter = min(prompt, max(context // 2, context - completion))
    original = "" if context == config.get("max_position_embeddings") else "original_"
    raise ConfigError(
        f"{group}max_prompt_tokens={prompt} and {group}max_completion_tokens={completion} are {prompt + completion} "
        f"tokens, and {setting} was made for {context} (its config.json: {original}max_position_embeddings). Type "
        f"{group}max_prompt_tokens={shorter} {group}max_completion_tokens={context - shorter}."
    )


def _check_layer_names(in_model: Sequence[Layer], cfg: RunConfig, setting: str) -> None:
    """Raise ConfigError if the model lacks a layer that lora.target_modules, aqn.norms or format.ignore names.

    `in_model` lists the layers of the model.
    """
    linears = [layer.name for layer in in_model if layer.is_linear]
    # Not the last norm, which belongs to no numbered layer and feeds none.
    in_layers = [layer.name for layer in in_model if len(layer.shape) == 1 and re.search(r"\.\d+\.", layer.name)]
    norms = sorted({name.rpartition(".")[2] for name in in_layers})
    ends = sorted({name.rpartition(".")[2] for name in linears} - {HEAD})

    def refuse(key: str, entry: str, kind: str, allowed: list[str], usual: Sequence[str] = ()) -> NoReturn:
        """Raise ConfigError for `entry`, a value of `key`, and propose one of `allowed`.

        An entry in `usual`, the default, is no typing error: the model has other names, so all of them are proposed.
        """
        is_default = entry in usual
        hint = "" if is_default else did_you_mean(entry, allowed)
        if allowed and not hint:
            hint = f" Type for example {key}={spell_list(allowed if is_default else allowed[:1])}."
        raise ConfigError(f"{key}: {entry!r} is no {kind} of {setting}; allowed: {', '.join(allowed)}.{hint}")

    for entry in cfg.lora.target_modules:
        if not cfg.trains_all and not any(f".{name}".endswith(f".{entry}") for name in linears):
            refuse("lora.target_modules", entry, "Linear layer", ends, LoraConfig().target_modules)
    for entry in cfg.aqn.norms:
        if entry not in norms:
            refuse("aqn.norms", entry, "norm in a layer", norms, AqnConfig().norms)
    for entry in cfg.format.ignore:
        if entry != HEAD and not any(is_ignored(name, [entry]) for name in linears):
            refuse("format.ignore", entry, "Linear layer", [*ends, "re:PATTERN"])


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Tell whether an entry of `ignore` matches the module `name`, so that it is left dense.

    An entry is a full name, the last parts of a name, a parent module, or `re:` and a pattern that matches from the
    beginning, as in compressed-tensors.
    """
    for entry in ignore:
        if entry.startswith("re:"):
            if re.match(entry[3:], name):
                return True
        elif name == entry or name.endswith(f".{entry}") or name.startswith(f"{entry}."):
            return True
    return False


@cache
def layers(folder: Path) -> tuple[Layer, ...]:
    """List the modules with a weight of the model in `folder`, from the headers of its files.

    Raises ConfigError if an index or a header cannot be read, or there are two sets of weights.
    """
    modules = []
    for file in list_weight_files(folder):
        for name, entry in read_safetensors_header(file)[0].items():
            if name != "__metadata__" and (match := _WEIGHT.match(name)):
                # bitsandbytes stores NF4 as one column of bytes, so that only the number of weights is known
                *rows, columns = entry["shape"]
                weights_per_element = 2 if entry["dtype"] == "U8" else 1  # two 4-bit weights in a byte
                modules.append(Layer(match[1], (*rows, columns * weights_per_element)))
    return tuple(modules)


def count_parameters(folder: Path) -> int:
    """Count the weights of the model in `folder`; a packed weight counts as its unpacked numbers. No biases."""
    return sum(math.prod(layer.shape) for layer in layers(folder))


def count_adapter_parameters(folder: Path, cfg: RunConfig) -> int:
    """Count the weights of the LoRA adapter that `cfg` puts on the model in `folder`.

    Layers packed in NF4 are left out, because NF4 stores no shape.
    """
    targets = tuple(f".{entry}" for entry in cfg.lora.target_modules)
    shapes = [layer.shape for layer in layers(folder) if f".{layer.name}".endswith(targets) and layer.is_linear]
    return cfg.lora.rank * sum(sum(shape) for shape in shapes if shape[-1] > 2)
