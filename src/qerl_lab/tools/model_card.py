"""The model card: what a run learned, from what, with what result, and how to load it."""

from collections.abc import Sequence
from typing import Any

import yaml

from qerl_lab.config.schema import DENSE_FORMAT, POCKET, RunConfig
from qerl_lab.config.task import part_of
from qerl_lab.model import gguf, on_disk
from qerl_lab.model.files import local_folder
from qerl_lab.model.loading import stored_as
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.vllm.lora_files import MAX_RANKS
from qerl_lab.rollout.vllm_server.serve_line import quantize_line
from qerl_lab.tools.export_options import ExportOptions

PAPER = "https://arxiv.org/abs/2510.11696"
PACKAGES = ("torch", "transformers", "trl", "peft")
Rows = Sequence[tuple[str, ...]]


def card(options: ExportOptions, trained: RunConfig, record: RunDirectory) -> str:
    """The text of README.md, as the hub reads it: a YAML head, then sections."""
    result, env = record.result(), record.environment()
    sections = (
        (f"# {options.folder.name}", _summary(options, trained)),
        ("## Load it", _loading(options, trained)),
        ("## Result", _result(result)),
        ("## Training", _training(trained)),
        ("## Data", _data(trained, env)),
        ("## Provenance", _provenance(env, result)),
    )
    body = "\n\n".join("\n".join([title, "", *lines]) for title, lines in sections)
    return f"---\n{yaml.safe_dump(_head(options, trained), sort_keys=False)}---\n\n{body}\n"


def _head(options: ExportOptions, trained: RunConfig) -> dict[str, Any]:
    head: dict[str, Any] = {
        "library_name": "transformers" if options.merged else "peft", "pipeline_tag": "text-generation",
        "tags": ["qerl-lab", "reinforcement-learning", trained.algorithm.name, trained.format.name],
    }  # fmt: skip
    path = trained.model.path
    return head if gguf.is_gguf(path) or on_disk.local(path) is not None else head | {"base_model": path}


def _summary(options: ExportOptions, trained: RunConfig) -> list[str]:
    kind = f"The merged model ({options.dtype})" if options.merged else "The LoRA adapter (PEFT)"
    own, algorithm = trained.aqn.schedule, trained.algorithm.name.upper()
    noise = "" if own == "off" else f", with noise on the norms while it sampled (AQN, {own})"
    return [
        f"{kind} of a reinforcement learning run of qerl-lab (QeRL, {PAPER}):",
        f"{trained.model.name} in {trained.format.name}, {algorithm} on {trained.task.name}{noise}.",
    ]


def _loading(options: ExportOptions, trained: RunConfig) -> list[str]:
    """What to type. `DIR` is this directory."""
    told = trained.task.instruction
    ask = f"Questions came with this system message: {told!r}." if told else "Questions came without a system message."
    lines = _of_model() if options.merged else _of_adapter(options, trained)
    return [*lines, "", f"{ask} The chat template is the base's."]


def _of_model() -> list[str]:
    return [
        "    from transformers import AutoModelForCausalLM, AutoTokenizer",
        '    model, tokenizer = AutoModelForCausalLM.from_pretrained("DIR"), AutoTokenizer.from_pretrained("DIR")',
        "",
        "vLLM: `vllm serve DIR`.",
    ]


def _of_adapter(options: ExportOptions, trained: RunConfig) -> list[str]:
    base = "DIR/base" if options.base else "BASE"
    rank = next((allowed for allowed in MAX_RANKS if allowed >= trained.lora.rank), trained.lora.rank)
    return [
        "    from peft import PeftModel",
        "    from transformers import AutoModelForCausalLM",
        f'    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "DIR")',
        "",
        f"vLLM: `vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules mine=DIR`.",
        *([] if options.base else ["", f"`BASE` is {_base_in_words(trained)}"]),
    ]


def _base_in_words(trained: RunConfig) -> str:
    path, name = trained.model.path, trained.format.name
    revision = f" at revision {trained.model.revision}" if trained.model.revision else ""
    in_format = "" if name == DENSE_FORMAT else f" in {name}"
    if gguf.is_gguf(path) or path == POCKET:
        return f"the weights of `{path}`{in_format}, dense; an export with base=true holds them."
    if name == DENSE_FORMAT or stored_as(local_folder(path, trained.model.revision)) is not None:
        return f"`{path}`{revision}."
    line = quantize_line(trained, "BASE")
    return f"`{path}`{revision}{in_format}, the weights that the adapter was trained on: `{line}`."


def _result(result: dict[str, Any]) -> list[str]:
    rows = [
        ("reward, first and last tenth of the steps", f"{result['reward_first']:.3f}, {result['reward_last']:.3f}"),
        ("policy entropy in nats, likewise", f"{result['entropy_first']:.3f}, {result['entropy_last']:.3f}"),
    ]
    if "accuracy_gain" in result:
        low, high = result["accuracy_gain_interval"]
        interval = f"[{low:+.3f}, {high:+.3f}]" if high > low else "[all alike]"  # no question differs: no interval
        questions = f"{result['questions']} questions, one seed"
        rows += [
            ("held-out accuracy before", f"{result['accuracy_before']:.3f}"),
            ("held-out accuracy after", f"{result['accuracy_after']:.3f}"),
            (f"gain, paired 95% interval, {questions}", f"{result['accuracy_gain']:+.3f} {interval}"),
        ]
    return _table(("", ""), rows)


def _training(trained: RunConfig) -> list[str]:
    rollout, lora, optim, task = trained.rollout, trained.lora, trained.optim, trained.task
    rows = [
        ("steps", f"{trained.steps} of {rollout.prompts_per_step} questions x {rollout.group_size} completions"),
        ("completion", f"at most {rollout.max_completion_tokens} tokens, temperature {rollout.temperature:g}"),
        ("adapter", f"rank {lora.rank}, alpha {lora.alpha or lora.rank:g}, on {', '.join(lora.target_modules)}"),
        ("optimizer", f"{optim.name}, learning rate {optim.learning_rate:g}, {optim.schedule}"),
        ("rewards", f"format {task.format_reward:g} for {task.format_reward_for}, answer {task.answer_reward:g}"),
        ("arm, seed", f"{trained.experiment}, {trained.seed}"),
    ]
    if lora.start_from:
        rows.append(("began with", f"the adapter of `{lora.start_from}` ({lora.start_hash})"))
    return [*_table(("", ""), rows), "", "`run.yaml` is the whole configuration."]


def _data(trained: RunConfig, env: dict[str, Any]) -> list[str]:
    task = trained.task
    where = f", read from `{task.path}`" if task.path else ""
    found = env.get("data") or {}
    rows = [
        (role, f"{found[f'{role}_questions']:,}", f"`{found[f'{role}_sha256']}`")
        for role in ("training", "heldout")
        if f"{role}_sha256" in found
    ]
    table = ["", *_table(("", "questions", "SHA-256"), rows)] if rows else []
    return [f"Questions of `{task.name}`{part_of(task.name, task.gsm8k.max_steps)}{where}.", *table]


def _provenance(env: dict[str, Any], result: dict[str, Any]) -> list[str]:
    installed = env.get("packages", {})
    rows = [
        ("command", f"`{env.get('command', 'not recorded')}`"),
        ("commit of qerl-lab", f"{env.get('git_sha', 'unknown')}{' and changes to it' if env.get('dirty') else ''}"),
        ("machine", f"{', '.join(gpu['name'] for gpu in env.get('gpus', [])) or 'no GPU'}, {result['seconds']:.0f} s"),
        ("versions", ", ".join(f"{name} {installed[name]}" for name in PACKAGES if name in installed)),
    ]
    return [*_table(("", ""), rows), "", "`export.json` has the SHA-256 of every file, and the origin of the base."]


def _table(head: tuple[str, ...], rows: Rows) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
