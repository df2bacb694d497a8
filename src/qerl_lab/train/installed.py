"""Report a broken optional package in one line, not with a traceback."""

import importlib
import importlib.util

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError


def check_vllm() -> None:
    """Raise ConfigError if vLLM is installed but cannot be imported.

    TRL imports vLLM whenever it is installed, even with `rollout=transformers`, and has no switch for that.
    """
    found = importlib.util.find_spec("vllm")
    if found is None:
        return
    try:
        importlib.import_module("trl.generation.vllm_generation")
    except Exception as error:  # a broken package can raise anything: a missing library, an incompatible torch
        place = next(iter(found.submodule_search_locations or [str(found.origin)]))
        raise ConfigError(
            f"vLLM is installed ({place}) and cannot be imported ({type(error).__name__}: {first_line(error)}). "
            "TRL imports it in every run, also with rollout=transformers. "
            "Type pip uninstall vllm, or install a vLLM that fits this torch."
        ) from error
