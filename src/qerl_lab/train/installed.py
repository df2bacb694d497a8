"""Packages that a run imports whether it uses them or not: a broken one is named in one line, not by a traceback."""

import importlib
import importlib.util

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError


def check_vllm() -> None:
    """Raise ConfigError if vLLM is installed and cannot be imported.

    TRL imports it wherever it finds it, with `rollout=transformers` too, and has no switch for that.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        return
    try:
        importlib.import_module("trl.generation.vllm_generation")
    except Exception as error:  # what a broken package raises is its own choice: a missing library, another torch
        place = next(iter(found.submodule_search_locations or [str(found.origin)]))
        raise ConfigError(
            f"vLLM is installed ({place}) and cannot be imported ({type(error).__name__}: {first_line(error)}). "
            "TRL imports it in every run, also with rollout=transformers. "
            "Type pip uninstall vllm, or install a vLLM that fits this torch."
        ) from error
