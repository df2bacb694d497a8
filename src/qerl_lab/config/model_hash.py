"""What is in a local model, as 12 hex digits, without reading all of it. Imports no torch."""

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
# What is read beside the weights. Not the lab's own records of a model: they have times and places.
BESIDE = (
    "config.json", "generation_config.json", *TOKENIZERS, "merges.txt", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
WHOLE = 4 * 2**20  # bytes up to which a file of weights is read whole
SMALL, PIECE = 64 * 2**10, 4 * 2**10  # bytes: up to which a tensor is read whole, and of a piece of a larger one
OF_A_TENSOR, OF_A_GGUF = 4, 1024  # pieces
SETTLED = 5.0  # seconds after a change from which the next one shows in a file's times; some systems count by two
_read: dict[tuple[Path, int, int, int, int, int], str] = {}  # by file, device, inode, size and both times


def model_hash(path: Path) -> str | None:
    """First 12 hex digits of a SHA-256 of a directory with safetensors, or of FILE.gguf; None for anything else.

    A directory counts by the names, sizes and bytes of its weights and of `BESIDE`; neither its place nor its other
    files do. `BESIDE` and files of up to 4 MiB are read whole. Of larger weights the size is read, and pieces of 4 KiB
    at even distances from the first byte to the last: of safetensors the header and 4 pieces of each tensor (one of up
    to 64 KiB, as norms and biases are, whole), of a GGUF 1,024 pieces.

    Training changes a tensor throughout, so pieces show it. They do not show what is changed between them alone: a few
    rows of a large matrix, a small tensor of a GGUF. A process reads a file once, and again when it was touched: the
    jobs of a sweep share their model.

    Raises ConfigError for a large safetensors file that is damaged in its header.
    """
    if not path.is_dir():
        return _of_file(path)[:12] if path.suffix == ".gguf" and path.is_file() else None
    weights = sorted(file for file in path.glob("*.safetensors") if file.is_file())
    if not weights:
        return None
    files = [*weights, *(file for name in BESIDE if (file := path / name).is_file())]
    text = "\n".join(f"{file.name} {_of_file(file)}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _of_file(file: Path) -> str:
    with file.open("rb", buffering=0) as opened:
        now = os.fstat(opened.fileno())  # of the open file: on a network one a path's may be a minute old
        state = (file, now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
        if state in _read:
            return _read[state]
        digest = hashlib.sha256(str(now.st_size).encode())
        for start, length in _stretches(file, now.st_size):
            opened.seek(start)
            digest.update(opened.read(length))
    if time.time() - now.st_ctime > SETTLED:
        _read[state] = digest.hexdigest()
    return digest.hexdigest()


def _stretches(file: Path, size: int) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of what is read of a file."""
    if size <= WHOLE or file.suffix not in (".safetensors", ".gguf"):
        yield 0, size
    elif file.suffix == ".gguf":
        yield from _spread(0, size, OF_A_GGUF)
    else:
        entries, begin = header(file)
        yield 0, begin
        for start, end in sorted(entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"):
            yield from _spread(begin + start, begin + end, OF_A_TENSOR)


def _spread(start: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` pieces from the first to the last byte; all bytes where these are few."""
    if end - start <= SMALL:
        yield start, end - start
        return
    last = end - start - PIECE
    yield from ((start + last * n // (count - 1), PIECE) for n in range(count))


def header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON that a safetensors file begins with, after 8 bytes of its length, and where it ends.

    Raises ConfigError where there is none, and where an entry lacks dtype, shape or place.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= MAX_HEADER_BYTES:
                raise ValueError(f"its header would be {length} bytes")
            entries = json.loads(opened.read(length))
        if not isinstance(entries, dict):
            raise ValueError("its header is no JSON object")
        for name, entry in entries.items():
            if name != "__metadata__" and not _is_tensor(entry):
                raise ValueError(f"its header lacks dtype, shape or data_offsets of {name}")
        return entries, 8 + length
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{file} is no safetensors file, or not whole ({error}). Download or save the model again."
        ) from None


def _is_tensor(entry: Any) -> bool:
    match entry:
        case {"dtype": str(), "shape": list(), "data_offsets": [int(), int()]}:
            return True
    return False
