"""Export a run for other libraries: `python -m qerl_lab.tools.export RUN_DIR out=DIR [merged=true]`.

Writes a PEFT adapter or a merged model, with a model card, to OUT.partial, and renames it to OUT when it is complete.
The options are checked before torch is imported.
"""

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from qerl_lab.cli.grammar import Command
from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.paths import WEIGHTS
from qerl_lab.config.records import EXPORT
from qerl_lab.config.schema import DENSE_FORMAT, POCKET, RunConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.config.task import subset_in_words
from qerl_lab.model import gguf, on_disk
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import installed_versions
from qerl_lab.record.out import OutputOptions, Unfinished, check_free
from qerl_lab.system import exits, terminal
from qerl_lab.tasks.questions import label

LINE = "python -m qerl_lab.tools.export"
PACKAGES = ("qerl-lab", "torch", "transformers", "trl", "peft")
KEPT_PACKED = ("nvfp4", "mxfp4")  # compressed-tensors keeps these layers without a `weight`, which PEFT needs


@dataclass
class ExportOptions(OutputOptions):
    run: str = option("", "directory of a finished run; required, the key may be left out")
    out: str = option("", "directory to write; required")
    merged: bool = option(False, "write one model that holds base and adapter; false writes the adapter alone")
    base: bool = option(False, "also write the base that the adapter was trained on, dequantized, to OUT/base")
    dtype: str = option(
        "bfloat16", "dtype of the weights of merged=true and base=true; float32 keeps every digit, in twice the bytes",
        choices=("bfloat16", "float32"),
    )  # fmt: skip
    overwrite: bool = option(False, "replace what is at `out`")


def requested_run(options: ExportOptions) -> RunDirectory:
    """Check the options, and return the run that they ask to export.

    Raises ConfigError unless the run is finished and has an adapter, and `out` may be written.
    """
    run = RunDirectory(Path(options.run).expanduser().absolute())
    trains_all = run.config().trains_all  # first, which raises for a directory that is no run
    if run.status != "done":
        raise ConfigError(
            f"run={options.run} is {run.status_in_words}; allowed: a finished run. "
            f"Type python -m qerl_lab {resume_override(options.run)} first."
        )
    if trains_all:
        raise ConfigError(
            f"run={options.run} trained all weights; allowed: a run with an adapter. Copy {run.model}: "
            "transformers and vLLM load it as it is."
        )
    if not (run.adapter / WEIGHTS).is_file():
        raise ConfigError(
            f"run={options.run} has no adapter/{WEIGHTS}. To write it again from the last checkpoint, move DONE out of "
            f"the directory and type python -m qerl_lab {resume_override(options.run)}."
        )
    check_free(options.folder, options.out, EXPORT, overwrite=options.overwrite)
    return run


def export(options: ExportOptions) -> None:
    """Write a run's adapter or merged model, with model card, configuration and export.json, to `options.out`.

    With `options.base` the dequantized base is written too. Raises ConfigError if an option cannot work, the run's base
    cannot be loaded or has changed, or the adapter is damaged.
    """
    run = requested_run(options)
    with terminal.quiet_imports():
        from peft import LoraConfig

        from qerl_lab.model import policy
        from qerl_lab.model.weight_files import lab_records, local_folder

    cfg = run.config()
    on_disk.check_content(cfg)
    path, base = cfg.model.path, local_folder(cfg.model.path, cfg.model.revision)
    run.refuse_other_model(base)
    about = {
        "options": asdict(options), "run": str(run.path), "packages": installed_versions(PACKAGES),
        "began_from": {"path": path, "revision": cfg.model.revision, "hash": cfg.model.hash, **lab_records(base)},
    }  # fmt: skip
    with Unfinished(options.folder, {}, options.overwrite) as unfinished:
        out = unfinished.folder
        (out / "README.md").write_text(f"{model_card(options, cfg, run)}\n", encoding="utf-8")
        (out / "run.yaml").write_text(run.config_text(), encoding="utf-8")
        if options.merged:
            write_dense(cfg, run.adapter, base, out, options.dtype, merged=True)
        else:
            policy.adapter_tensors(run.adapter)  # raises for damaged weights
            shutil.copyfile(run.adapter / WEIGHTS, out / WEIGHTS)
            base_name = path if on_disk.is_on_hub(path) else str(base)
            settings = LoraConfig.from_pretrained(run.adapter)
            settings.base_model_name_or_path = str(options.folder / "base") if options.base else base_name
            settings.revision = cfg.model.revision
            settings.target_modules = sorted(settings.target_modules)  # PEFT keeps a set, which has no fixed order
            settings.save_pretrained(out)
        if options.base:
            write_dense(cfg, run.adapter, base, out / "base", options.dtype, merged=False)
        about["sha256"] = unfinished.hashes()
        (out / EXPORT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        unfinished.finish()
    what = "merged model" if options.merged else "adapter"
    print(f"{what}: {terminal.format_path(options.folder)}  (README.md says how to load it and on which weights)")


def write_dense(cfg: RunConfig, adapter: Path, base: Path, out: Path, dtype_name: str, *, merged: bool) -> None:
    """Write a run's base model, quantized as in the run and dequantized, to `out` for transformers.

    `merged` adds `adapter` to the weights. `base` is the folder of the base model, for the tokenizer. Computes in
    float32 on the CPU, and rounds the result to `dtype_name`. Prints how much of the adapter a rounded merge keeps.
    """
    import torch

    from qerl_lab.model import policy
    from qerl_lab.model.dense import dense_tensors, write_model

    dtype = getattr(torch, dtype_name)
    model = replace(cfg.model, dtype="float32", attention="eager")  # it never runs; others may need a package
    cfg = replace(cfg, model=model, format=replace(cfg.format, dense_cache="off"))
    loaded = policy.build(cfg, torch.device("cpu"))
    policy.load_adapter(loaded.model, adapter)
    tensors, share = dense_tensors(loaded, dtype, merged=merged)
    if merged and dtype != torch.float32:
        terminal.say(
            f"note: rounding to {dtype_name} moved the weights {share:.0%} as far as the adapter did, so the model may "
            "answer otherwise than the run. Type dtype=float32, or leave merged out, to keep the adapter whole."
        )
    write_model(tensors, dtype, base, out)


def model_card(options: ExportOptions, cfg: RunConfig, run: RunDirectory) -> str:
    """Return the text of the exported model's card, from model_card.md.j2: training, result, how to load the model."""
    from huggingface_hub import ModelCard, ModelCardData

    from qerl_lab.rollout.vllm.transfer import MAX_RANKS

    path, result, env = cfg.model.path, run.result(), run.environment()
    low, high = result.get("accuracy_gain_interval", (0.0, 0.0))
    card_data = ModelCardData(
        library_name="transformers" if options.merged else "peft",
        pipeline_tag="text-generation",
        tags=["qerl-lab", "reinforcement-learning", cfg.algorithm.name, cfg.format.name],
        base_model=path if on_disk.is_on_hub(path) else None,
    )
    made = env.get("packages", {})
    return str(ModelCard.from_template(
        card_data, template_path=str(Path(__file__).with_name("model_card.md.j2")),
        options=options, cfg=cfg, result=result, env=env, data=env.get("data") or {},
        max_rank=next((allowed for allowed in MAX_RANKS if allowed >= cfg.lora.rank), cfg.lora.rank),
        base_in_words=base_in_words(cfg),
        base_is_packed=(
            cfg.format.name in KEPT_PACKED and not options.base and path != POCKET and not gguf.is_gguf(path)
        ),
        task=label(cfg.task),
        part_of_task=subset_in_words(cfg.task.name, cfg.task.gsm8k.max_steps),
        interval=f"[{low:+.3f}, {high:+.3f}]" if high > low else "[no spread]",  # questions agree: no interval
        versions=", ".join(f"{name} {made[name]}" for name in PACKAGES if name in made),
    ))  # fmt: skip


def base_in_words(cfg: RunConfig) -> str:
    """Return a sentence for the model card on the base weights that the adapter is to be loaded on.

    If a command quantizes them, the sentence has the command.
    """
    from qerl_lab.model.loading import stored_as
    from qerl_lab.model.weight_files import local_folder
    from qerl_lab.rollout.vllm_server.server_command import quantize_line

    path, name = cfg.model.path, cfg.format.name
    revision = f" at revision {cfg.model.revision}" if cfg.model.revision else ""
    in_format = "" if name == DENSE_FORMAT else f" in {name}"
    if gguf.is_gguf(path) or path == POCKET:
        return f"the weights of `{path}`{in_format}, dense; an export with base=true holds them."
    if name == DENSE_FORMAT or stored_as(local_folder(path, cfg.model.revision)) is not None:
        return f"`{path}`{revision}."
    line = quantize_line(cfg, "BASE")
    return f"`{path}`{revision}{in_format}, the weights that the adapter was trained on: `{line}`."


COMMAND = Command(
    f"{LINE} RUN_DIR out=DIR",
    "Write what a run learned for PEFT, transformers and vLLM: an adapter, or a merged model, with a model card",
    ExportOptions,
    export,
    examples=(
        (f"{LINE} RUN_DIR out=exports/mine", "the adapter"),
        (f"{LINE} RUN_DIR out=exports/mine base=true", "the adapter, and the dequantized base that it was trained on"),
        (f"{LINE} RUN_DIR out=exports/mine-merged merged=true", "one model in bfloat16"),
    ),
    required=("run", "out"),
    bare="run",
    alone=True,
)
main = exits.command(COMMAND.run)


if __name__ == "__main__":
    exits.run(main)
