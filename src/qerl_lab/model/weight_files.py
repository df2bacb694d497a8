"""Read safetensors weights from a folder, with or without an index, as on the Hugging Face hub."""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qerl_lab.config.message import first_line, say_hub_is_asked
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import RECORDS
from qerl_lab.model import gguf, on_disk
from qerl_lab.model.on_disk import INDEX, SINGLE, read_model_json

# Download weights, configurations and tokenizers: no code, no pickles, no second copy of the weights.
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_UNWANTED = ["*/*", "consolidated*"]
_COMPANIONS = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation_config

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class Stored(NamedTuple):
    """File, shape and dtype of a stored tensor, from the header of the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


class Weights(ABC):
    """Weights of a model, by tensor name. A subclass reads the tensors from files, or makes them.

    Attributes:
        stored: file, shape and dtype of each tensor.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = stored

    @property
    def names(self) -> tuple[str, ...]:
        """Return all tensor names, in stored order."""
        return tuple(self.stored)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self.stored[name].dtype

    def where(self, name: str) -> str:
        """Return the path of the file that holds the tensor `name`, for messages."""
        return str(self.stored[name].file)

    @abstractmethod
    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Return the tensor `name`, in its own memory on `device`."""


class WeightFiles(Weights):
    """Safetensors weights of a folder, file by file. Reads and checks headers at once, tensors on request."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of the weight files in `folder`.

        Raises ValueError for a missing or damaged file or an unknown dtype, ConfigError for an unreadable index or two
        sets of weights.
        """
        self.files = on_disk.list_weight_files(folder)
        stored: dict[str, Stored] = {}
        for file in self.files:
            if not file.is_file():
                raise ValueError(
                    f"{file} is missing; allowed: {SINGLE}, or {folder / INDEX} and the files that it lists "
                    "(safetensors only: other kinds of files can run code)"
                )
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.offset_keys():  # in stored order
                        tensor = opened.get_slice(name)
                        stored[name] = Stored(file, tuple(tensor.get_shape()), DTYPES[tensor.get_dtype()])
            except SafetensorError as error:
                raise ValueError(f"{file} cannot be read, or is not whole ({error}); download it again") from None
            except KeyError as error:
                raise ValueError(f"{file} has a tensor in {error}; allowed: {', '.join(DTYPES)}") from None
        super().__init__(stored)

    def bytes(self, name: str) -> int:
        """Return the size of the tensor `name` in bytes."""
        return torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """Read one tensor into its own memory, so that later changes of the file do not change it."""
        device = torch.device(device)
        if device == torch.device("cuda"):  # safetensors would take the first GPU, not the current one
            device = torch.device("cuda", torch.cuda.current_device())
        with safe_open(self.stored[name].file, framework="pt", device=str(device)) as opened:
            tensor = opened.get_tensor(name)
        return tensor.clone() if tensor.device.type == "cpu" else tensor  # on a CPU it is a view of the mapped file


def local_folder(path: str, revision: str | None, *, key: str = "model.path") -> Path:
    """Return the local directory of the model `path`; if needed, unpack a GGUF file or download `revision` of a hub id.

    A revision of None is the newest. Raises ConfigError, naming the config key `key` that holds `path`, if there is no
    such model, the hub cannot be reached, or the GGUF file cannot be unpacked.
    """
    if (folder := on_disk.local_path(path, key)) is not None:
        return folder
    if gguf.is_gguf(path):
        return gguf.unpack(Path(path).expanduser())
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    say_hub_is_asked(f"{key}={path}")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{key}={path} is neither a directory here nor in the cache of the Hugging Face hub, and the hub cannot be "
            f"reached. Type {key}=DIR or {key}=FILE.gguf with a copy of the model, or try again with a network "
            "and without HF_HUB_OFFLINE."
        ) from error
    except (OSError, ValueError) as error:  # not found, not an id
        raise loading_error(f"{key}={path}", error, " Type a reachable hub id, or a path.") from error


def loading_error(setting: str, error: Exception, remedy: str = "") -> ConfigError:
    """Build the ConfigError for a model that could not be loaded because of `error`.

    `setting` is what was typed for the model (`key=value`), `remedy` a last sentence with what to type.
    """
    return ConfigError(f"{setting} could not be loaded ({type(error).__name__}: {first_line(error)}).{remedy}")


def copy_companions(source: Path, target: Path) -> None:
    """Copy tokenizer, chat template, licence and generation config from folder `source` to folder `target`.

    Leaves out weights, config.json and the lab's records (RECORDS, such as quality.json).
    """
    for file in sorted(source.iterdir()):
        is_companion = file.suffix in _COMPANIONS or file.name.startswith(("LICENSE", "NOTICE"))
        is_left_out = file.name in ("config.json", *RECORDS) or file.name.endswith(".index.json")
        if file.is_file() and is_companion and not is_left_out:
            shutil.copyfile(file, target / file.name)


def lab_records(folder: Path) -> dict[str, Any]:
    """Read the JSON records (RECORDS) that the lab's commands left in `folder`, by file name; {} if there are none."""
    return {name: read_model_json(folder / name) for name in RECORDS if (folder / name).is_file()}
