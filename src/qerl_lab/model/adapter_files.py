"""Validate the adapter that a run starts from (`lora.start_from`) from its files alone, before torch is imported."""

import json
from pathlib import Path

from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS, adapter_folder, file_hash
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import shell_line, spell_list

SETTINGS = "adapter_config.json"
# Values of a plain LoRA adapter. Other initializations (PiSSA, OLoRA, CorDA, LoRA-GA, LoftQ) change the base.
PLAIN = {
    "use_dora": (False,), "use_rslora": (False,), "bias": ("none",), "modules_to_save": (), "rank_pattern": ({},),
    "alpha_pattern": ({},), "alora_invocation_tokens": (), "kasa_config": (),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
}  # fmt: skip


def base_of(folder: Path) -> str | None:
    """Return the model on which the adapter in `folder` was trained, by its adapter_config.json; None if not noted."""
    return json.loads((folder / SETTINGS).read_text(encoding="utf-8")).get("base_model_name_or_path") or None


def check(cfg: RunConfig) -> None:
    """Raise ConfigError unless the adapter lora.start_from is plain LoRA with rank, alpha and targets of cfg.lora.

    Its weights must have the hash lora.start_hash, set when the run was composed; None accepts any weights.
    """
    assert cfg.lora.start_from is not None
    lora, setting = cfg.lora, f"lora.start_from={cfg.lora.start_from}"
    folder = adapter_folder(cfg.lora.start_from)
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting} has no {SETTINGS} that can be read ({error}). Type an adapter of PEFT.") from None
    needed = {"peft_type": str, "target_modules": list, "r": int, "lora_alpha": int | float}
    is_whole = isinstance(settings, dict) and all(isinstance(settings.get(key), needed[key]) for key in needed)
    if not is_whole or settings["peft_type"] != "LORA":
        raise ConfigError(f"{setting} is no LoRA adapter with a list of layers ({folder / SETTINGS}). Type another.")
    for key, plain in PLAIN.items():
        if settings.get(key) not in (*plain, None):
            allowed = ", ".join(map(str, plain or (None,)))
            raise ConfigError(
                f"{setting} has {key}={settings[key]}; allowed: plain LoRA, {key} one of {allowed}. "
                "Type another adapter. PEFT converts one that changed its base by "
                "save_pretrained(DIR, path_initial_model_for_weight_conversion=ADAPTER_BEFORE_TRAINING)."
            )
    compared = (  # key, value of the adapter, value of the run; alpha=null means the rank
        ("rank", settings["r"], lora.rank),
        ("alpha", float(settings["lora_alpha"]), lora.alpha or float(settings["r"])),
        ("target_modules", spell_list(sorted(settings["target_modules"])), spell_list(sorted(lora.target_modules))),
    )
    if differ := {key: value for key, value, of_run in compared if value != of_run}:
        has = shell_line([f"lora.{key}={value}" for key, value in differ.items()])
        of_run = " ".join(f"lora.{key}={spell_value(getattr(lora, key))}" for key in differ)
        raise ConfigError(f"{setting} has {has}, and this run has {of_run}. Type {has}.")
    found = file_hash(folder / WEIGHTS)
    if lora.start_hash not in (None, found):
        raise ConfigError(
            f"{setting} was another adapter when the run was composed (lora.start_hash={lora.start_hash}, now "
            f"{found}). Put it back as it was, or start a new run."
        )
