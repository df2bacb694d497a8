"""A tokenizer's files. Imports no transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How a tokenizer was found, which transformers (5.17) writes down as if it were a property of it.
OF_LOADING = ("is_local", "local_files_only")


def save(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the same files for the same tokenizer, in the reach of a hub or out of it (HF_HUB_OFFLINE=1).

    Two such folders would else differ in model.hash, and their runs be of two arms.
    """
    for name in OF_LOADING:
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
