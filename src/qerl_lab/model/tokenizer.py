"""Save a tokenizer, and choose the padding token. Imports no transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from qerl_lab.config.option import ConfigError

# How a tokenizer was loaded. transformers (5.17) saves this as if it were a property of the tokenizer.
OF_LOADING = ("is_local", "local_files_only")


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the tokenizer's files, identical with and without access to the hub (HF_HUB_OFFLINE=1).

    Otherwise model.hash would differ, and the runs would count as two arms.
    """
    for name in OF_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def pad_id(tokenizer: "PreTrainedTokenizerBase", embeddings: int) -> int:
    """Return the padding token's id: the tokenizer's own if the model has an embedding for it, else the end token's.

    Any token would do, because padding is masked. Raises ConfigError if neither id is below `embeddings`.
    """
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None and number < embeddings:
            return number
    raise ConfigError(
        f"the tokenizer's end token is {tokenizer.eos_token!r}, id {tokenizer.eos_token_id}, and the model has "
        f"{embeddings} embeddings; allowed: an end token that the model has. Put the model's own tokenizer beside it."
    )
