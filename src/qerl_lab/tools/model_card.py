"""Write the model card of an export: what a run learned, from what, with what result, and how to load it."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import Environment

from qerl_lab.config.schema import DENSE_FORMAT, POCKET, RunConfig
from qerl_lab.config.task import part_of
from qerl_lab.model import gguf, on_disk
from qerl_lab.model.files import local_folder
from qerl_lab.model.loading import stored_as
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.vllm.transfer import MAX_RANKS
from qerl_lab.rollout.vllm_server.server_command import quantize_line
from qerl_lab.tools.export_options import ExportOptions

TEMPLATE = Path(__file__).with_name("model_card.md.j2")
PACKAGES = ("torch", "transformers", "trl", "peft")


def card(options: ExportOptions, run: RunConfig, record: RunDirectory) -> str:
    """Fill model_card.md.j2 to the text of README.md for the hub: a YAML head and sections."""
    result, env = record.result(), record.environment()
    data, packages = env.get("data") or {}, env.get("packages", {})
    environment = Environment(keep_trailing_newline=True)
    environment.filters["cell"] = lambda text: str(text).replace("|", "\\|")  # of a Markdown table
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        options=options, run=run, result=result, env=env, card_data=_head(options, run).to_yaml(),
        max_rank=next((allowed for allowed in MAX_RANKS if allowed >= run.lora.rank), run.lora.rank),
        base_in_words=_base_in_words(run), instruction=repr(run.task.instruction), interval=_interval(result),
        part_of_task=part_of(run.task.name, run.task.gsm8k.max_steps),
        data=[(role, data[f"{role}_questions"], data[f"{role}_sha256"]) for role in ("training", "heldout")
              if f"{role}_sha256" in data],
        versions=", ".join(f"{name} {packages[name]}" for name in PACKAGES if name in packages),
    )  # fmt: skip


def _head(options: ExportOptions, run: RunConfig) -> ModelCardData:
    path = run.model.path
    return ModelCardData(
        library_name="transformers" if options.merged else "peft",
        pipeline_tag="text-generation",
        tags=["qerl-lab", "reinforcement-learning", run.algorithm.name, run.format.name],
        base_model=None if gguf.is_gguf(path) or on_disk.local(path) is not None else path,
    )


def _base_in_words(run: RunConfig) -> str:
    path, name = run.model.path, run.format.name
    revision = f" at revision {run.model.revision}" if run.model.revision else ""
    in_format = "" if name == DENSE_FORMAT else f" in {name}"
    if gguf.is_gguf(path) or path == POCKET:
        return f"the weights of `{path}`{in_format}, dense; an export with base=true holds them."
    if name == DENSE_FORMAT or stored_as(local_folder(path, run.model.revision)) is not None:
        return f"`{path}`{revision}."
    line = quantize_line(run, "BASE")
    return f"`{path}`{revision}{in_format}, the weights that the adapter was trained on: `{line}`."


def _interval(result: dict[str, Any]) -> str:
    low, high = result.get("accuracy_gain_interval", (0.0, 0.0))
    return f"[{low:+.3f}, {high:+.3f}]" if high > low else "[all alike]"  # all questions agree: no interval
