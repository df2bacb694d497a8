"""Use a GGUF file as a model: transformers dequantizes it once into a directory that is read like any other model.

The directory is cached in HF_HOME/qerl-lab, under the file's name and a hash of its path, size and modification time.
It holds weights in bfloat16, tokenizer, chat template, and `gguf.json`, which describes the file. torch is imported
only when a file is unpacked.
"""

import hashlib
import importlib.metadata
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256
from qerl_lab.config.records import UNPACKED
from qerl_lab.system.disk import cache_folder, exclusive

SUFFIX = ".gguf"
FETCHED = {  # a file that make fetches -> the command, the model's id on the hub
    "SmolLM2-135M-Instruct.Q4_1.gguf": ("make smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf": ("make qwen", "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf": ("make qwen QWEN=0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
}
# Dequantized weights have the dtype of the policy's base, so that vLLM needs no copy.
DTYPE, WEIGHT_BYTES = "bfloat16", 2
LAYOUT = 3  # part of the hash: raise it to unpack every file anew
CONTROL, USER_DEFINED = 3, 4  # types of tokens that are never split; those of the first are special tokens
SAMPLE = "Ann's 12 apples,\n\nand 3,456,789 (or 1234567)?\n"  # a tokenizer must keep each of its characters
ROPE_TENSORS = ("rope_freqs.", "rope_factors_")  # divisors of rotary frequencies, of Llama 3.1 and Phi-3
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id", "pad_token": "tokenizer.ggml.padding_token_id",
}  # fmt: skip
END_OF_TURN = "tokenizer.ggml.eot_token_id"  # if the end of an answer is not the end of a text


class Header(NamedTuple):
    """Counts of the weights in a GGUF file, and the metadata in its header."""

    parameters: int
    tensor_counts: dict[str, int]  # by quantization type, such as Q4_K; the most frequent type first
    metadata: dict[str, Any]  # by GGUF's key, such as `tokenizer.ggml.model`


def is_gguf(path: str) -> bool:
    """Tell whether a path ends in .gguf; the file need not exist."""
    return path.endswith(SUFFIX)


def existing_file(path: str, key: str) -> Path:
    """Return `path` with ~ expanded. Raises ConfigError, naming the config key `key`, if there is no such file."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    remedy = "Type the path of a file that is there; make smollm2 and make qwen fetch one into models/."
    if file.name in FETCHED:
        target, hub_id = FETCHED[file.name]
        remedy = f"Type {target}, which fetches it into models/, or {key}={hub_id} where there is a hub."
    raise ConfigError(f"{key}={path} is no file; allowed: a GGUF file, a directory or a hub id. {remedy}")


def unpacked_folder(file: Path) -> Path:
    """Return the cache directory that a GGUF file is or will be unpacked to.

    A moved or changed file gets another directory, because the name has a hash of path, size and modification time.
    """
    status, resolved = file.stat(), file.resolve()
    key = f"{LAYOUT} {resolved} {status.st_size} {status.st_mtime_ns}"
    return cache_folder() / f"{file.name.removesuffix(SUFFIX)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def header(file: Path) -> Header:
    """Read a GGUF file's header. Raises ConfigError if the file is damaged, or if it scales the rotary positions.

    transformers (5.17) leaves that scaling out, and would compute another model. Reading takes 6 s for a vocabulary of
    150,000 tokens.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        tensors, metadata = reader.tensors, {name: field.contents() for name, field in reader.fields.items()}
        end = reader.data_offset
        for tensor in tensors:  # one after the other, as llama.cpp requires: a wrong type or shape has another size
            if tensor.data_offset != end:
                raise ValueError(f"{tensor.name} begins at byte {tensor.data_offset}, and its place is {end}")
            end += -(-tensor.n_bytes // reader.alignment) * reader.alignment
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:  # damage ends in any of these
        raise ConfigError(f"{file} is no GGUF file, or not whole ({first_line(error)}). Download it again.") from None
    rope_scaling = [key for key, value in metadata.items() if key.endswith(".rope.scaling.type") and value != "none"]
    rope_scaling += [tensor.name for tensor in tensors if tensor.name.startswith(ROPE_TENSORS)]
    if rope_scaling:
        raise ConfigError(
            f"{file} scales its rotary positions ({', '.join(rope_scaling)}), which transformers leaves out when it "
            "reads a GGUF file; allowed: files without such scaling. Type the path of the model as safetensors."
        )
    kinds = Counter(tensor.tensor_type.name for tensor in tensors)
    return Header(sum(tensor.n_elements for tensor in tensors), dict(kinds.most_common()), metadata)


def unpack(file: Path) -> Path:
    """Return the cache directory of an unpacked GGUF file; unpack the file first if the cache lacks it.

    Raises ConfigError if the file is damaged or transformers cannot read it.
    """
    folder = unpacked_folder(file)
    if folder.is_dir():
        return folder
    cache_folder().mkdir(parents=True, exist_ok=True)
    with exclusive(cache_folder()):  # among ranks and jobs of a sweep the first unpacks, the others wait
        if folder.is_dir():
            return folder
        contents = header(file)
        kinds = ", ".join(f"{kind} ({count})" for kind, count in contents.tensor_counts.items())
        notice = f"{file.name}: tensors in {kinds}; transformers dequantizes them to {DTYPE}, kept in {folder}"
        print(notice, file=sys.stderr, flush=True)
        partial = folder.with_name(f"{folder.name}.partial")  # renamed when complete
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _dequantize(file, partial, contents)
        except Exception as error:  # damaged metadata ends in any class of error, also of tokenizers and gguf
            shutil.rmtree(partial)
            raise ConfigError(
                f"transformers cannot read {file} ({type(error).__name__}: {first_line(error)}). "
                "Type the path of the model as safetensors, or a GGUF file of another kind."
            ) from error
        partial.rename(folder)
    return folder


def _dequantize(file: Path, folder: Path, file_header: Header) -> None:
    """Dequantize a GGUF file and write model, tokenizer and `gguf.json` to the existing directory `folder`.

    Raises ValueError if transformers would leave out weights or the rotary base of the file, or change its tokenizer.
    """
    import torch
    from tokenizers import AddedToken, decoders
    from tokenizers.models import BPE
    from transformers import AutoTokenizer, GgufConfig

    from qerl_lab.model.chat import save_tokenizer
    from qerl_lab.model.loading import load_by_transformers

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    is_bpe = isinstance(tokenizer.backend_tokenizer.model, BPE)  # as every language model in GGUF
    if not is_bpe or tokenizer.decode(tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]) != SAMPLE:
        raise ValueError("it builds another tokenizer than the file's, and prompts would be other tokens")
    dequantizes = GgufConfig(dequantize=True)
    model = load_by_transformers(
        file.parent, getattr(torch, DTYPE), gguf_file=file.name, quantization_config=dequantizes
    )
    weights, with_copies = model.num_parameters(), sum(tensor.numel() for tensor in model.state_dict().values())
    if file_header.parameters not in (weights, with_copies):  # a tied output layer may be in the file too
        raise ValueError(
            f"it has {file_header.parameters:,} weights, and {type(model).__name__} {weights:,}: some would be left out"
        )
    metadata = file_header.metadata
    base = metadata.get(f"{metadata['general.architecture']}.rope.freq_base")
    read_base = (getattr(model.config, "rope_parameters", None) or {}).get("rope_theta", base)
    if read_base != base:
        raise ValueError(f"its rotary frequencies have the base {base:g}, and {type(model).__name__} {read_base:g}")
    # Restore what transformers 5.17 drops. For the llama architecture eos becomes the file's bos, user-defined tokens
    # are split, and decoded text loses a leading space. For others control tokens such as <|user|> are split.
    for name, key in SPECIAL.items():
        if key in metadata:
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(metadata[key]))
    ends = [metadata[key] for key in (SPECIAL["eos_token"], END_OF_TURN) if key in metadata]
    if len({*ends}) > 1:  # transformers drops the second, and with it the end of each answer of Gemma
        model.generation_config.eos_token_id = ends
    for number, kind in enumerate(metadata.get("tokenizer.ggml.token_type", ())):
        if kind in (CONTROL, USER_DEFINED):
            token = tokenizer.convert_ids_to_tokens(number)
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=kind == CONTROL))
    if metadata.get("tokenizer.ggml.model") == "gpt2":  # byte-level BPE
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf", "torch")}
    about = {
        "file": str(file.resolve()), "sha256": sha256(file), "bytes": file.stat().st_size,
        "tensors": file_header.tensor_counts, "parameters": file_header.parameters, "dequantized_to": DTYPE,
        "packages": versions,
    }  # fmt: skip
    (folder / UNPACKED).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
