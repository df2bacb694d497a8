"""A tokenizer's files, and the token that pads. Imports no transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

from qerl_lab.config.option import ConfigError

# How a tokenizer was found, which transformers (5.17) writes down as if it were a property of it.
OF_LOADING = ("is_local", "local_files_only")


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the same files for the same tokenizer, in the reach of a hub or out of it (HF_HUB_OFFLINE=1).

    Two such folders would else differ in model.hash, and their runs be of two arms.
    """
    for name in OF_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)


def pad_id(tokenizer: "PreTrainedTokenizerBase", embeddings: int) -> int:
    """Return the id of the token that pads: the tokenizer's own where the model has an embedding of it, else the end
    token. Any will do, since padding is masked.

    Raises ConfigError where neither is an id below `embeddings`.
    """
    for number in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if number is not None and number < embeddings:
            return number
    raise ConfigError(
        f"the tokenizer's end token is {tokenizer.eos_token!r}, id {tokenizer.eos_token_id}, and the model has "
        f"{embeddings} embeddings; allowed: an end token that the model has. Put the model's own tokenizer beside it."
    )
