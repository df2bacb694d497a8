"""Hash the content of a local model without reading all of it. Imports no torch."""

import hashlib
import json
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# Files hashed beside the weights. The lab's records are left out: they hold times and paths.
BESIDE = (
    "config.json", "generation_config.json", *TOKENIZERS, "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
MAX_WHOLE_FILE = 4 * 2**20  # bytes; weight files up to this size are read whole, larger ones in samples
MAX_WHOLE_TENSOR = 64 * 2**10  # bytes; tensors of a large file up to this size are read whole
SAMPLE_BYTES = 4 * 2**10
SAMPLES_PER_TENSOR, SAMPLES_PER_GGUF = 4, 1024


def model_hash(path: Path) -> str | None:
    """Return 12 hex digits that identify a local model by content. None unless it is a safetensors folder or FILE.gguf.

    The hash covers the weights. For a folder it also covers the files in `BESIDE` and the names of all these files. It
    does not depend on where the model lies.

    Files in `BESIDE` and weight files of up to 4 MiB are read whole. For a larger weight file the hash covers the size
    and samples of 4 KiB at even distances: 1,024 samples of a GGUF file, or the header and 4 samples per tensor of a
    safetensors file. Tensors of up to 64 KiB, such as a norm or bias, are read whole there.

    Training changes a tensor throughout, so samples detect it. They can miss an edit of a few rows of a large matrix,
    or of a small tensor in a GGUF.

    Raises ConfigError if the header of a large safetensors file is damaged.
    """
    if not path.is_dir():
        return _hash_file(path)[:12] if path.suffix == ".gguf" and path.is_file() else None
    weights = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not weights:
        return None
    beside = [path / name for name in BESIDE]
    files = [*weights, *(file for file in beside if file.is_file())]
    text = "\n".join(f"{file.name} {_hash_file(file)}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _hash_file(file: Path) -> str:
    """Return the SHA-256 of a file's size and content as hex digits. Reads only samples of a large weight file."""
    size = file.stat().st_size
    if size <= MAX_WHOLE_FILE or file.suffix not in (".safetensors", ".gguf"):
        parts = [(0, size)]
    elif file.suffix == ".gguf":
        parts = _spread_samples(0, size, SAMPLES_PER_GGUF)
    else:
        entries, begin = read_safetensors_header(file)
        parts = [(0, begin)]
        for start, end in sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"):
            parts += _spread_samples(begin + start, begin + end, SAMPLES_PER_TENSOR)
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb", buffering=0) as opened:
        for start, length in parts:
            opened.seek(start)
            digest.update(opened.read(length))
    return digest.hexdigest()


def _spread_samples(start: int, end: int, count: int) -> list[tuple[int, int]]:
    """List (offset, length) in bytes of `count` samples of a file, evenly spread between offsets `start` and `end`.

    A range of up to MAX_WHOLE_TENSOR bytes is one sample.
    """
    if end - start <= MAX_WHOLE_TENSOR:
        return [(start, end - start)]
    last = end - start - SAMPLE_BYTES
    return [(start + last * n // (count - 1), SAMPLE_BYTES) for n in range(count)]


def read_safetensors_header(file: Path) -> tuple[dict[str, Any], int]:
    """Read the JSON header of a safetensors file. Return the header and the byte offset where it ends.

    Raises ConfigError if the file cannot be read, or if its header is cut off or no JSON object, as in a Git LFS
    pointer file. Does not check the tensors behind the header.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
        if not isinstance(header, dict):
            raise ValueError("its header is no JSON object")
        return header, 8 + length
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no safetensors file, or not whole ({error}). Download or save the model again."
        ) from None
