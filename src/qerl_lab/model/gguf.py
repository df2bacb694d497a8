"""Use a GGUF file as a model: transformers dequantizes it once into a directory that is read like any other model.

The directory is cached in HF_HOME/qerl-lab, under the file's name and a hash of its path, size and modification time.
It holds weights in bfloat16, tokenizer, chat template, and `gguf.json`, which describes the file. torch is imported
only when a file is unpacked.
"""

import hashlib
import importlib.metadata
import json
import math
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

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
LAYOUT = 2  # part of the hash: raise it to unpack every file anew
STRING, ARRAY = 8, 9  # types of metadata values
MAX_TEXT_BYTES = 2**24  # a damaged length would fill the memory
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # for `struct`
USER_DEFINED = 4  # token type: never split, but not a special token
ROPE_TENSORS = ("rope_freqs.", "rope_factors_")  # divisors of rotary frequencies, of Llama 3.1 and Phi-3
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id", "pad_token": "tokenizer.ggml.padding_token_id",
}  # fmt: skip


class Header(NamedTuple):
    """What a GGUF header says about weights and tokenizer."""

    parameters: int
    tensor_counts: dict[str, int]  # by quantization type, such as Q4_K; the most frequent type first
    special_ids: dict[str, int]  # token ids by transformers' name, such as `eos_token`
    unsplit_ids: list[int]  # ids of user-defined tokens, which are never split but are not special
    is_byte_level: bool  # whether the tokenizer is byte-level BPE, as in GPT-2
    rope_scaling: list[str]  # names of keys and tensors that scale the rotary positions, as in Llama 3.1


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
        remedy = f"Type {target}, which fetches it, or {key}={hub_id} where there is a hub."
    raise ConfigError(f"{key}={path} is no file; allowed: a GGUF file, a directory or a hub id. {remedy}")


def unpacked_folder(file: Path) -> Path:
    """Return the cache directory that a GGUF file is or will be unpacked to.

    A moved or changed file gets another directory, because the name has a hash of path, size and modification time.
    """
    status, place = file.stat(), file.resolve()
    key = f"{LAYOUT} {place} {status.st_size} {status.st_mtime_ns}"
    return cache_folder() / f"{file.name.removesuffix(SUFFIX)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def header(file: Path) -> Header:
    """Read a GGUF file's header. Raises ConfigError if the file is damaged, or if it scales the rotary positions.

    transformers (5.17) leaves that scaling out, so that the model would compute otherwise at every position. The reader
    of the package gguf takes 7 s for a vocabulary of 150,000 tokens, this function half a second.
    """
    try:
        with file.open("rb") as opened:
            contents = _read_header(opened, file.stat().st_size)
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise ConfigError(f"{file} is no GGUF file, or not whole ({first_line(error)}). Download it again.") from None
    if contents.rope_scaling:
        raise ConfigError(
            f"{file} scales its rotary positions ({', '.join(contents.rope_scaling)}), which transformers leaves out "
            "when it reads a GGUF file; allowed: files without such scaling. Type the path of the model as safetensors."
        )
    return contents


def _read_header(opened: BinaryIO, size: int) -> Header:
    """Read keys and tensor entries of a GGUF file of `size` bytes (https://github.com/ggml-org/ggml, docs/gguf.md).

    Raises ValueError if the file is not GGUF version 2 or 3, or ends before its tensors do. Damaged values may raise
    KeyError, TypeError or struct.error instead.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    def read_number(form: str) -> Any:
        return struct.unpack(f"<{form}", opened.read(struct.calcsize(form)))[0]

    def read_text() -> str:
        return opened.read(min(read_number("Q"), MAX_TEXT_BYTES)).decode()

    def read_value(kind: int) -> Any:
        if kind == STRING:
            return read_text()
        if kind == ARRAY:
            kind, count = read_number("I"), read_number("Q")
            return [read_value(kind) for _ in range(count)]
        return read_number(NUMBERS[kind])

    if opened.read(4) != b"GGUF" or read_number("I") not in (2, 3):
        raise ValueError("it does not begin with GGUF and version 2 or 3")
    tensors, keys = read_number("Q"), read_number("Q")
    metadata = {read_text(): read_value(read_number("I")) for _ in range(keys)}
    rope_scaling = [key for key, value in metadata.items() if key.endswith(".rope.scaling.type") and value != "none"]
    parameters, end, kinds = 0, 0, Counter[str]()
    for _ in range(tensors):
        if (name := read_text()).startswith(ROPE_TENSORS):
            rope_scaling.append(name)
        count = math.prod([read_number("Q") for _ in range(read_number("I"))])
        kind, offset = GGMLQuantizationType(read_number("I")), read_number("Q")
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        parameters += count
        end = max(end, offset + count // per_block * block_bytes)
        kinds[kind.name] += 1
    align = metadata.get("general.alignment") or 32
    end += math.ceil(opened.tell() / align) * align
    if end > size:
        raise ValueError(f"its tensors end at byte {end}, the file at {size}")
    special = {name: metadata[key] for name, key in SPECIAL.items() if key in metadata}
    unsplit = [n for n, kind in enumerate(metadata.get("tokenizer.ggml.token_type", ())) if kind == USER_DEFINED]
    is_byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    return Header(parameters, dict(kinds.most_common()), special, unsplit, is_byte_level, rope_scaling)


def unpack(file: Path) -> Path:
    """Return the cache directory of an unpacked GGUF file; unpack it first if it is not there.

    Raises ConfigError if the file is damaged or transformers cannot read it.
    """
    folder = unpacked_folder(file)
    if folder.is_dir():
        return folder
    contents = header(file)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with exclusive(cache_folder()):  # among ranks and jobs of a sweep the first unpacks, the others wait
        if folder.is_dir():
            return folder
        kinds = ", ".join(f"{kind} ({count})" for kind, count in contents.tensor_counts.items())
        notice = f"{file.name}: tensors in {kinds}; transformers dequantizes them to {DTYPE}, kept in {folder}"
        print(notice, file=sys.stderr, flush=True)
        partial = folder.with_name(f"{folder.name}.partial")  # renamed when complete
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            _dequantize(file, partial, contents)
        except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
            shutil.rmtree(partial)
            raise ConfigError(
                f"transformers cannot read {file} ({type(error).__name__}: {first_line(error)}). "
                "Type the path of the model as safetensors, or a GGUF file of another kind."
            ) from error
        partial.rename(folder)
    return folder


def _dequantize(file: Path, folder: Path, file_header: Header) -> None:
    """Dequantize a GGUF file and write model, tokenizer and `gguf.json` to the existing directory `folder`."""
    import torch
    from tokenizers import AddedToken, decoders
    from transformers import TOKENIZER_MAPPING, AutoTokenizer, GgufConfig, PreTrainedTokenizerFast

    from qerl_lab.model.chat import save_tokenizer
    from qerl_lab.model.loading import load_by_transformers

    dequantizes = GgufConfig(dequantize=True)
    model = load_by_transformers(
        file.parent, getattr(torch, DTYPE), gguf_file=file.name, quantization_config=dequantizes
    )
    weights, with_copies = model.num_parameters(), sum(tensor.numel() for tensor in model.state_dict().values())
    if file_header.parameters not in (weights, with_copies):  # a tied output layer may be in the file too
        raise ValueError(
            f"it has {file_header.parameters:,} weights, and {type(model).__name__} {weights:,}: some would be left out"
        )
    # AutoTokenizer alone would read the header once more, to find this class: 14 s for a vocabulary of 150,000.
    kind = TOKENIZER_MAPPING.get(type(model.config), object)
    if not issubclass(kind, PreTrainedTokenizerFast):  # mistral-common's, where vLLM is installed, reads no GGUF
        kind = AutoTokenizer
    tokenizer = kind.from_pretrained(file.parent, gguf_file=file.name)
    # Restore what transformers 5.17 drops for the llama architecture: without this eos becomes the file's bos,
    # user-defined tokens are split, and decoded text loses a leading space.
    for name, number in file_header.special_ids.items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    unsplit = tokenizer.convert_ids_to_tokens(file_header.unsplit_ids)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in unsplit])
    if file_header.is_byte_level:
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
