"""`python -m qerl_lab.evaluate accuracy`: ask benchmarks part by part, so that a stopped command can continue.

The files of an evaluation are written to OUT.partial, which is renamed to OUT when complete: eval.parquet with a row
per completion, evaluation.json with settings and results. The engine "own" loads the base as stored. With common=true a
second engine, "common", loads the base dequantized to bfloat16, which is the same computation for all weight formats.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from qerl_lab import formats, rollout
from qerl_lab.config.message import first_line
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import WEIGHTS, sha256
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate import subject, summary
from qerl_lab.evaluate.accuracy import ask_questions, evaluation_seed
from qerl_lab.evaluate.evaluate_options import BY_FIRST_CHARACTER, BY_TASK, SMALL, SMALL_SAMPLES, AccuracyOptions
from qerl_lab.evaluate.subject import Subject
from qerl_lab.evaluate.summary import ABOUT, COMMON, OWN, ROWS, SCHEMA
from qerl_lab.model import gpu_memory, policy
from qerl_lab.model.policy import Policy
from qerl_lab.model.weight_files import local_folder
from qerl_lab.record.environment import environment
from qerl_lab.record.out import Unfinished, check_free
from qerl_lab.rollout.engine import Engine, EngineFailed, Sampling
from qerl_lab.system import terminal
from qerl_lab.system.disk import read_json, replace_file, strict_json
from qerl_lab.tasks import Question, Task
from qerl_lab.tasks.answers.completion import final_answer
from qerl_lab.tasks.module_file import Column


def run(options: AccuracyOptions) -> None:
    """Evaluate a run or model on benchmarks: ask, grade, write and print. If the results exist, only print them.

    The results go to `options.out`; if not given, to a folder below the run or evaluations/ that is named by a hash of
    the settings. Raises ConfigError if the run or model cannot be evaluated, a benchmark cannot be read, or the folder
    holds other results; ValueError if the engine failed (finished parts are kept); OSError if a file cannot be written.
    """
    chosen = subject.resolve_subject(options)
    tasks = subject.load_benchmarks(options, chosen.cfg)
    for task in tasks:
        if options.grading == BY_FIRST_CHARACTER and not all(question.answer for question in task.heldout):
            raise ConfigError(
                f"grading={BY_FIRST_CHARACTER} compares with an answer, and questions of {task.name} have none. "
                "Leave grading out."
            )
    identity = identifying_settings(options, chosen, tasks)
    if options.out:
        out = Path(options.out).expanduser().absolute()
    else:
        above = Path("evaluations", chosen.cfg.model.name)
        if options.run:
            above = Path(options.run).expanduser() / "evaluations"
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        out = (above / f"{'+'.join(task.name for task in tasks)}-{key}").absolute()
    known = read_json(out / ABOUT, dict) if (out / ABOUT).is_file() else {}
    if (known.get("schema"), known.get("identity")) == (SCHEMA, identity):
        return print_results(out, "was evaluated before")
    check_free(out, options.out or str(out), ABOUT, overwrite=options.overwrite)
    # A dense base is asked once: its own engine is the common one.
    engines = (OWN, COMMON) if options.common and not chosen.is_dense else (OWN,)
    if options.benchmarks:  # the run's own held-out questions are none of its training questions
        tasks = subject.note_trained_questions(chosen, tasks)
    with Unfinished(out, identity, options.overwrite) as unfinished:
        seconds = sum(ask_engine(chosen, tasks, identity, engine, unfinished) for engine in engines)
        write_results(options, chosen, tasks, identity, seconds, unfinished)
    print_results(out, "is evaluated")


def identifying_settings(options: AccuracyOptions, chosen: Subject, tasks: Sequence[Task]) -> dict[str, Any]:
    """Return the settings that determine the answers of the run or model `chosen` to `tasks`, as a dict for JSON."""
    cfg, device = chosen.cfg, policy.device_of(chosen.cfg.device)
    drawn = f"temperature {cfg.eval.temperature:g}, top-p {cfg.eval.top_p:g}" if cfg.eval.temperature else "greedy"
    sampling = f"{drawn}, {cfg.rollout.max_completion_tokens:,} tokens"
    samples = {task.name: options.samples or (SMALL_SAMPLES if task.name in SMALL else cfg.eval.samples)
               for task in tasks}  # fmt: skip
    began = chosen.base or cfg.model
    trained: str | None = "none"
    if chosen.base:  # a run with lora=full, which trained `cfg.model`
        trained = model_hash(Path(cfg.model.path))
    elif chosen.adapter:
        trained = sha256(chosen.adapter / WEIGHTS)
    return {
        "weights": {"hash": model_hash(local_folder(began.path, began.revision))},  # equal for copies
        "format": cfg.format.name,
        "format_options": asdict(formats.build(cfg.format)) | {"ignore": cfg.format.ignore},
        "lora": [cfg.lora.rank, cfg.lora.alpha],
        "adapter": trained,
        "rollout": cfg.rollout.engine, "device": device.type, "dtype": str(policy.compute_dtype(cfg, device)),
        "batch_size": cfg.rollout.batch_size, "common": options.common,
        "benchmarks": {task.name: {"instruction": task.instruction, **task.data} for task in tasks},
        "questions": options.questions, "seed": cfg.seed, "max_prompt_tokens": cfg.rollout.max_prompt_tokens,
        "samplings": {sampling: samples if cfg.eval.temperature else dict.fromkeys(samples, 1)},
    } | ({} if options.grading == BY_TASK else {"grading": options.grading})  # fmt: skip


def ask_engine(
    chosen: Subject, tasks: Sequence[Task], identity: Mapping[str, Any], engine: str, unfinished: Unfinished
) -> float:
    """Load the engine OWN or COMMON of `chosen` and let it answer (see `answer_missing_parts`).

    Returns the seconds of answering. Frees policy and engine on return, before the next engine is built.
    """
    with ExitStack() as stack:
        evaluated = chosen if engine == OWN else stack.enter_context(subject.dequantized_subject(chosen))
        loaded = subject.load_policy(evaluated)
        if not gpu_memory.is_shared(loaded.device):  # asked only now: another evaluation may load at the same time
            evaluated.cfg.jobs_per_gpu = 1  # the jobs that shared the GPU with the run have ended
        sampler = stack.enter_context(closing(rollout.build(evaluated.cfg, loaded)))
        started = time.time()
        answer_missing_parts(chosen.cfg, tasks, identity, engine, loaded, sampler, unfinished)
        return time.time() - started


class Part(NamedTuple):
    """Questions of a benchmark that are asked together."""

    file: str  # name of the Parquet file with their answers
    task: Task
    number: int  # of the part in its benchmark, from 0
    questions: Sequence[Question]


def _parts_of(cfg: RunConfig, task: Task, engine: str, loaded: Policy, samples: int) -> list[Part]:
    """Split the questions of a benchmark into parts of about one generation batch, or four for vLLM, which refills it.

    Leaves out questions longer than max_prompt_tokens. Raises ConfigError if all are.
    """
    limit = cfg.rollout.max_prompt_tokens
    batches = 1 if cfg.rollout.engine == "transformers" else 4
    lengths = [len(loaded.chat.prompt_ids(task.messages(question))) for question in task.heldout]
    fitting = [question for question, length in zip(task.heldout, lengths, strict=True) if length <= limit]
    if not fitting:
        raise ConfigError(
            f"max_prompt_tokens={limit} leaves out all {len(lengths):,} questions of {task.name}; the shortest has "
            f"{min(lengths)} tokens. Type max_prompt_tokens={max(lengths)}."
        )
    size = max(1, cfg.rollout.batch_size * batches // samples)
    slices = [fitting[begin : begin + size] for begin in range(0, len(fitting), size)]
    return [Part(f"{engine}-{task.name}-{n:05d}.parquet", task, n, questions) for n, questions in enumerate(slices)]


def answer_missing_parts(
    cfg: RunConfig, tasks: Sequence[Task], identity: Mapping[str, Any], engine: str, loaded: Policy, sampler: Engine,
    unfinished: Unfinished,
) -> None:  # fmt: skip
    """Ask the questions to which the folder `unfinished` has no answers yet, and write the answers there.

    Each part (`_parts_of`) gets a Parquet file with a row per completion. The number of the part enters the sampling
    seed, which is the same for all arms and engines. Raises ConfigError if all questions of a benchmark are too long,
    ValueError if the engine failed or its logits are NaN.

    Args:
        identity: settings from `identifying_settings`, with the number of samples of each benchmark.
        engine: OWN or COMMON, the name of `sampler` in the rows.
    """
    ((sampling_name, samples),) = identity["samplings"].items()
    parts = [part for task in tasks for part in _parts_of(cfg, task, engine, loaded, samples[task.name])]
    for note in loaded.chat.notes:
        terminal.say(f"note: {note}")
    missing = [part for part in parts if not unfinished.has(part.file)]
    total = sum(len(part.questions) * samples[part.task.name] for part in parts)
    to_ask = sum(len(part.questions) * samples[part.task.name] for part in missing)
    with terminal.ProgressBar(f"{engine} engine", total, total - to_ask, unit="completion") as bar:
        for file, task, number, questions in missing:
            seed, count = evaluation_seed(cfg.seed, task.name, number), samples[task.name]
            sampling = Sampling(cfg.rollout.max_completion_tokens, seed, cfg.eval.temperature, cfg.eval.top_p)
            try:
                rows = ask_questions(sampler, loaded, task, questions, count, sampling, bar.advance)
            except EngineFailed as error:
                reason = first_line(error).rstrip(".")
                raise ValueError(f"{reason}. The same command goes on where it stopped.") from error
            except FloatingPointError as error:
                raise ValueError(f"{error}, so the answers to {task.name} would be random.") from error
            if "grading" in identity:
                rows["accuracy"] = same_first_character(rows["completion"], rows["answer"])
            prompts = [json.dumps(task.messages(question)).encode() for question in questions]
            hashes = [hashlib.sha256(prompt).hexdigest()[:16] for prompt in prompts for _ in range(count)]
            columns: dict[Column, Any] = {
                "benchmark": task.name, "engine": engine, "sampling": sampling_name, "prompt_sha256": hashes,
            }  # fmt: skip
            rows = pd.concat([pd.DataFrame(columns, index=rows.index), rows.drop(columns="entropy_nats")], axis=1)
            replace_file(unfinished.folder / file, rows.to_parquet(index=False))
            unfinished.note(file)


def same_first_character(completions: Iterable[str], answers: Iterable[str]) -> list[float]:
    """Grade completions as QeRL's released eval/gsm8k.py: 1.0 if the answers' first characters are equal, else 0.0.

    That script compares both answers character by character, and uses only the first comparison. An empty answer, an
    error in that script, counts as wrong here.
    """
    finals = [final_answer(completion) or "" for completion in completions]
    return [float(final[:1] == answer[:1] != "") for final, answer in zip(finals, answers, strict=True)]


def write_results(
    options: AccuracyOptions, chosen: Subject, tasks: Sequence[Task], identity: Mapping[str, Any],
    seconds: float, unfinished: Unfinished,
) -> None:  # fmt: skip
    """Merge the answers in the folder `unfinished` into eval.parquet, write evaluation.json, and rename the folder.

    `seconds` is the time that answering took.
    """
    cfg, folder = chosen.cfg, unfinished.folder
    files = sorted(folder.glob("*-*-*.parquet"))
    rows = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    rows = rows.sort_values("engine", ascending=False, kind="stable", ignore_index=True)  # own before common
    asked = rows.loc[(rows["engine"] == OWN) & (rows["draw"] == 0), "benchmark"].value_counts()
    too_long = {task.name: len(task.heldout) - int(asked[task.name]) for task in tasks}
    notes = []
    for task in tasks:
        notes += [f"{task.name}: {line}" for line in task.warnings]
        if count := too_long[task.name]:
            limit = f"max_prompt_tokens={cfg.rollout.max_prompt_tokens}"
            are = "question is" if count == 1 else "questions are"
            notes.append(f"{task.name}: {count} {are} longer than {limit}, and left out")
    if options.common and chosen.is_dense:
        notes.append(f"its own engine is the common one: {cfg.format.name} is dense")
    about = {
        "schema": SCHEMA,
        "identity": identity,
        "subject": chosen.description,
        "model": {"path": cfg.model.path, "revision": cfg.model.revision},
        "run_seed": chosen.run_seed,
        "arm": chosen.arm,
        "own_is_common": chosen.is_dense,
        "notes": notes,
        "benchmarks": {name: data | {"too_long": too_long[name]} for name, data in identity["benchmarks"].items()},
        "results": summary.summarize_each(rows),
        "seconds": round(seconds, 1),
        "environment": environment(),
    }
    replace_file(folder / ROWS, rows.to_parquet(index=False))
    replace_file(folder / ABOUT, strict_json(about))
    for file in files:
        file.unlink()
    unfinished.finish()


def print_results(folder: Path, state: str) -> None:
    """Print the settings, table and notes of the finished evaluation in `folder`.

    The first line says what was evaluated, then `state`: "is evaluated" or "was evaluated before".
    """
    about = read_json(folder / ABOUT, dict)
    identity = about["identity"]
    print(f"{about['subject']} {state}: {identity['format']}, {identity['rollout']}, no noise, seed {identity['seed']}")
    print(f"sampling: {'; '.join(identity['samplings'])}")
    print("grading: by first character, as QeRL's released code\n" if "grading" in identity else "")
    print(summary.table(about["results"]))
    for note in about["notes"]:
        print(f"note: {note}")
    print(f"\nanswers: {terminal.format_path(folder)}  ({ROWS}, {ABOUT})")
