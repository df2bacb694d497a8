"""Write an export: read the run, write adapter or merged model to OUT.partial, add the card, rename to OUT."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from peft import LoraConfig

from qerl_lab import terminal
from qerl_lab.config.paths import WEIGHTS, sha256
from qerl_lab.config.records import EXPORT
from qerl_lab.config.schema import DENSE_FORMAT, POCKET, RunConfig
from qerl_lab.disk import replace_file
from qerl_lab.model import gguf, on_disk, policy
from qerl_lab.model.dense import dense_tensors
from qerl_lab.model.files import copy_companions, local_folder, noted, read_json
from qerl_lab.record.environment import versions
from qerl_lab.record.partial import JOURNAL, Unfinished
from qerl_lab.tools.export_options import ExportOptions
from qerl_lab.tools.model_card import card


def run(options: ExportOptions) -> None:
    """Write the adapter or the merged model, as `options` say, with its card.

    Raises:
        ConfigError: the run's base cannot be loaded or has changed, or the adapter belongs to another base.
        OSError: the disk is full, or a file cannot be read or written.
    """
    record, trained = options.directory, options.directory.config()
    on_disk.check_content(trained)
    base = local_folder(trained.model.path, trained.model.revision)
    identity = {
        "run": str(record.path), "merged": options.merged, "base": options.base, "dtype": options.dtype,
        "adapter": sha256(record.adapter / WEIGHTS),
    }  # fmt: skip
    with Unfinished(options.folder, identity, options.overwrite) as unfinished:
        unfinished.clear()
        out = unfinished.folder
        if options.merged:
            write_dense(trained, record.adapter, base, out, options.dtype, merged=True)
        else:
            named = str(options.folder / "base") if options.base else _named(trained, base)
            write_adapter(trained, record.adapter, out, named)
        if options.base:
            (out / "base").mkdir()
            write_dense(trained, record.adapter, base, out / "base", options.dtype, merged=False)
        (out / "README.md").write_text(card(options, trained, record), encoding="utf-8")
        (out / "run.yaml").write_text(record.text(), encoding="utf-8")
        about = {"options": asdict(options), "run": str(record.path), "began_from": _origin(trained, base)}
        _write_record(out, about | {"result": record.result(), "environment": record.environment()})
        unfinished.finish()
    what = "merged model" if options.merged else "adapter"
    print(f"{what}: {terminal.near(options.folder)}  (README.md says how to load it)")
    if not (options.merged or options.base or is_plain(trained)):
        print(
            f"note: it was trained on {trained.model.name} in {trained.format.name}; on other weights of that model it "
            "is another policy. Type base=true to have them beside it, or merged=true."
        )


def is_plain(trained: RunConfig) -> bool:
    """Tell whether transformers loads the run's base from model.path: dense, no GGUF file, not the pocket policy."""
    return trained.format.name == DENSE_FORMAT and trained.model.path != POCKET and not gguf.is_gguf(trained.model.path)


def write_adapter(trained: RunConfig, adapter: Path, out: Path, base: str) -> None:
    """Write PEFT's two files, with `base` as their model. Raises ConfigError if the weights are damaged."""
    policy.adapter_tensors(adapter)
    shutil.copyfile(adapter / WEIGHTS, out / WEIGHTS)
    settings = LoraConfig.from_pretrained(adapter)
    settings.base_model_name_or_path, settings.revision = base, trained.model.revision
    settings.target_modules = sorted(settings.target_modules)  # PEFT keeps a set, whose order varies
    settings.save_pretrained(out)


def write_dense(trained: RunConfig, adapter: Path, base: Path, out: Path, dtype_name: str, *, merged: bool) -> None:
    """Write a model that transformers loads: weights in `dtype_name`, config, tokenizer, chat template."""
    dtype = getattr(torch, dtype_name)
    trained.format.dense_cache, trained.model.dtype = "off", "float32"  # merge in float32
    trained.model.attention = "sdpa"  # attention never runs here, and another package may be missing
    loaded = policy.build(trained, torch.device("cpu"))
    policy.begin_with(loaded.model, adapter)
    tensors = dense_tensors(loaded, dtype, merged=merged)
    save_torch_state_dict({name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}, out)
    copy_companions(base, out)
    config = read_json(base / "config.json") | {"dtype": dtype_name}
    for key in ("quantization_config", "torch_dtype"):
        config.pop(key, None)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _named(trained: RunConfig, base: Path) -> str:
    """Return where others find the run's base: its hub id, or the folder."""
    is_on_hub = on_disk.local(trained.model.path) is None and not gguf.is_gguf(trained.model.path)
    return trained.model.path if is_on_hub else str(base)


def _origin(trained: RunConfig, base: Path) -> dict[str, Any]:
    """Describe the run's base, with the records that the lab's commands left in its folder."""
    own = trained.model
    return {"path": own.path, "revision": own.revision, "hash": own.hash, **noted(base)}


def _write_record(out: Path, about: dict[str, Any]) -> None:
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != JOURNAL)
    about["sha256"] = {str(path.relative_to(out)): sha256(path) for path in files}
    about["packages"] = versions(("qerl-lab", "torch", "peft", "transformers"))
    replace_file(out / EXPORT, json.dumps(about, indent=1).encode() + b"\n")
