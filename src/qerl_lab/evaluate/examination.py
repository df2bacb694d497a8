"""`python -m qerl_lab.evaluate accuracy`: ask benchmarks part by part, so that a stopped command can continue.

All files are written to OUT.partial, which is renamed to OUT when complete: eval.parquet with a row per completion,
evaluation.json with settings and results.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab import rollout, terminal
from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.disk import read_json, replace_file, strict_json
from qerl_lab.evaluate import benchmarks, subject, summary
from qerl_lab.evaluate.accuracy import ask, seed_of
from qerl_lab.evaluate.benchmarks import Benchmark
from qerl_lab.evaluate.options import SMALL, SMALL_SAMPLES, AccuracyOptions
from qerl_lab.evaluate.sampling import HowSampled
from qerl_lab.evaluate.subject import Subject
from qerl_lab.evaluate.summary import ABOUT, ROWS, SCHEMA
from qerl_lab.model import policy
from qerl_lab.model.policy import Policy
from qerl_lab.record.environment import environment
from qerl_lab.record.partial import Unfinished
from qerl_lab.rollout.engine import Engine, EngineFailed, Sampling
from qerl_lab.tasks import Question


@dataclass(frozen=True)
class Part:
    """Questions of a benchmark that are asked together; `number` enters the draw's seed, `place` counts samplings."""

    benchmark: Benchmark
    engine: str
    sampling: HowSampled
    samples: int
    place: int
    number: int
    questions: Sequence[Question]

    @property
    def file(self) -> str:
        """Name of the file with its answers."""
        return f"{self.engine}-{self.benchmark.name}-{self.place}-{self.number:05d}.parquet"

    @property
    def completions(self) -> int:
        return len(self.questions) * self.samples


def run(options: AccuracyOptions) -> None:
    """Ask, grade, write and print.

    Raises:
        ConfigError: the run or model cannot be evaluated, a benchmark cannot be read, or `out` has other settings.
        ValueError: the engine failed; finished parts are kept.
        OSError: the disk is full, or a file cannot be written.
    """
    found = subject.subject_of(options)
    asked = benchmarks.load(options, found.cfg)
    identity = identity_of(options, found, asked)
    out = folder_of(options, found, identity, asked)
    if (out / ABOUT).is_file() and read_json(out / ABOUT, dict).get("identity") == identity:
        show(out, read_json(out / ABOUT, dict), "was evaluated before")
        return
    if out.exists() and not options.overwrite:
        raise ConfigError(f"out={out} holds something else. Type another out, or overwrite=true to replace it.")
    with Unfinished(out, identity, options.overwrite) as unfinished:
        about = examined(options, found, identity, asked, unfinished)
        unfinished.finish()
    show(out, about, "is evaluated")


def examined(
    options: AccuracyOptions, found: Subject, identity: dict[str, Any], asked: Sequence[Benchmark],
    unfinished: Unfinished,
) -> dict[str, Any]:  # fmt: skip
    """Answer the missing parts, write both result files and delete the parts; return the content of evaluation.json."""
    started = time.time()
    engines = [summary.OWN, *([summary.COMMON] if options.common and not found.is_common else [])]
    left_out = {engine: answer(options, found, asked, engine, unfinished) for engine in engines}[summary.OWN]
    rows = gather(unfinished.folder)
    about = {
        "schema": SCHEMA,
        "identity": identity,
        "subject": found.said,
        "model": {"path": found.cfg.model.path, "revision": found.cfg.model.revision},
        "run_seed": found.run_seed,
        "arm": found.arm,
        "own_is_common": found.is_common,
        "notes": notes(options, found, asked, left_out),
        "benchmarks": {one.name: benchmarks.about(one) | {"too_long": left_out[one.name]} for one in asked},
        "results": summary.of_rows(rows),
        "seconds": round(time.time() - started, 1),
        "environment": environment(),
    }
    replace_file(unfinished.folder / ROWS, rows.to_parquet(index=False))
    replace_file(unfinished.folder / ABOUT, strict_json(about))
    for file in parts_in(unfinished.folder):
        file.unlink()
    return about


def identity_of(options: AccuracyOptions, found: Subject, asked: Sequence[Benchmark]) -> dict[str, Any]:
    """Return the settings that determine the answers, by option name."""
    cfg, device = found.cfg, policy.device_of(found.cfg.device)
    return {
        "weights": subject.weights(cfg),
        "format": cfg.format.name, "format_options": subject.format_options(cfg),
        "lora": [cfg.lora.rank, cfg.lora.alpha], "adapter": found.adapter_sha256,
        "rollout": cfg.rollout.engine, "device": device.type, "dtype": str(policy.compute_dtype(cfg, device)),
        "batch_size": cfg.rollout.batch_size, "common": options.common,
        "benchmarks": {one.name: benchmarks.about(one) for one in asked}, "questions": options.questions,
        "seed": cfg.seed, "max_prompt_tokens": cfg.rollout.max_prompt_tokens,
        "samplings": {
            how.name: {one.name: how.samples_of(one.name, cfg.eval.samples) for one in asked} for how in found.samplings
        },
    }  # fmt: skip


def folder_of(options: AccuracyOptions, found: Subject, identity: Any, asked: Sequence[Benchmark]) -> Path:
    """Return `out`, or a folder named by a hash of the settings below the run or below ./evaluations."""
    if options.out:
        return Path(options.out).expanduser().absolute()
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    above = Path(options.run).expanduser() if options.run else Path()
    below = Path("evaluations") if options.run else Path("evaluations") / found.cfg.model.name
    return (above / below / f"{'+'.join(one.name for one in asked)}-{key}").absolute()


def answer(
    options: AccuracyOptions, found: Subject, asked: Sequence[Benchmark], engine: str, unfinished: Unfinished
) -> dict[str, int]:
    """Answer the missing parts with one engine; return the number of too long questions per benchmark."""
    limit = found.cfg.rollout.max_prompt_tokens
    with opened(found, engine) as (loaded, sampler):
        fitting = {one.name: one.fitting(loaded, limit) for one in asked}
        for note in loaded.chat.notes:
            terminal.say(f"note: {note}")
        parts = [part for one in asked for part in split(one, engine, fitting[one.name], found)]
        total = sum(part.completions for part in parts)
        done = sum(part.completions for part in parts if unfinished.has(part.file))
        with terminal.Amount(f"{engine} engine", total, done, unit="completion") as bar:
            for part in parts:
                if not unfinished.has(part.file):
                    rows = answered(found, part, loaded, sampler, bar)
                    replace_file(unfinished.folder / part.file, rows.to_parquet(index=False))
                    unfinished.note(part.file)
    return {one.name: len(one.questions) - len(fitting[one.name]) for one in asked}


@contextmanager
def opened(found: Subject, engine: str) -> Iterator[tuple[Policy, Engine]]:
    """Load the subject, dequantized for the common engine, and build its sampler without noise."""
    with nullcontext(found) if engine == summary.OWN else subject.dequantized(found) as one:
        loaded = subject.load(one)
        with closing(rollout.build(one.cfg, loaded)) as sampler:
            yield loaded, sampler


def split(benchmark: Benchmark, engine: str, questions: Sequence[Question], found: Subject) -> Iterator[Part]:
    """Split the questions into parts of about one generation batch; four batches for vLLM, which refills them."""
    at_once = found.cfg.rollout.batch_size * (1 if found.cfg.rollout.engine == "transformers" else 4)
    for place, sampling in enumerate(found.samplings):
        samples = sampling.samples_of(benchmark.name, found.cfg.eval.samples)
        size = max(1, at_once // samples)
        for number, begin in enumerate(range(0, len(questions), size)):
            yield Part(benchmark, engine, sampling, samples, place, number, questions[begin : begin + size])


def answered(found: Subject, part: Part, loaded: Policy, sampler: Engine, bar: terminal.Amount) -> pd.DataFrame:
    """Ask one part. The draw depends on seed, benchmark and part, so that all arms and engines share it."""
    seed, how = seed_of(found.cfg.seed, part.benchmark.name, part.number), part.sampling
    sampling = Sampling(how.max_completion_tokens, seed, how.temperature, how.top_p)
    task, samples = part.benchmark.task, part.samples
    try:
        rows = ask(sampler, loaded, task, part.questions, samples, sampling, bar.advance).rows
    except EngineFailed as error:
        raise ValueError(f"{first_line(error)} The same command goes on where it stopped.") from error
    prompts = [hashlib.sha256(json.dumps(task.messages(one)).encode()).hexdigest()[:16] for one in part.questions]
    rows.insert(0, "prompt_sha256", [prompt for prompt in prompts for _ in range(samples)])
    rows.insert(0, "sampling", part.sampling.name)
    rows.insert(0, "engine", part.engine)
    rows.insert(0, "benchmark", part.benchmark.name)
    return rows


def parts_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*-*-*-*.parquet"))


def gather(folder: Path) -> pd.DataFrame:
    """Return all answers: own engine before common, then by benchmark and sampling, in the order asked."""
    rows = pd.concat([pd.read_parquet(file) for file in parts_in(folder)], ignore_index=True)
    return rows.sort_values("engine", ascending=False, kind="stable", ignore_index=True)


def notes(options: AccuracyOptions, found: Subject, asked: Sequence[Benchmark], left_out: dict[str, int]) -> list[str]:
    """Return the notes to print below the table."""
    limit = found.cfg.rollout.max_prompt_tokens
    said = [f"{one.name}: {line}" for one in asked for line in one.task.warnings]
    said += [
        f"{name}: {count} questions are longer than max_prompt_tokens={limit}, and left out"
        for name, count in left_out.items() if count
    ]  # fmt: skip
    if options.run and found.adapter is None:
        said.append("adapter=false: the base of the run alone")
    if found.adapter is not None and subject.is_zero(found.adapter):
        said.append("the adapter is all zero: these are the answers of the base alone")
    if options.common and found.is_common:
        said.append(f"its own engine is the common one: {found.cfg.format.name} is dense")
    few = [one.name for one in asked if one.name in SMALL and _fewest(found, one.name) < SMALL_SAMPLES]
    if few:
        said.append(
            f"{', '.join(few)}: 30 or 40 questions with fewer than {SMALL_SAMPLES} samples each say little; read the "
            f"error, or type samples={SMALL_SAMPLES} and a temperature above 0"
        )
    if len(found.samplings) > 1:
        said.append(f"the run's own evaluations sample as the first row: {found.samplings[0].name}")
    return said


def _fewest(found: Subject, benchmark: str) -> int:
    """Return the smallest number of samples per question of a benchmark."""
    return min(how.samples_of(benchmark, found.cfg.eval.samples) for how in found.samplings)


def show(out: Path, about: dict[str, Any], what: str) -> None:
    """Print the table, the notes and the folder with the answers."""
    identity = about["identity"]
    how = "; ".join(identity["samplings"])
    print(f"{about['subject']} {what}: {identity['format']}, {identity['rollout']}, no noise, seed {identity['seed']}")
    print(f"sampling: {how}\n")
    print(summary.table(about["results"]))
    for note in about["notes"]:
        print(f"note: {note}")
    print(f"\nanswers: {terminal.near(out)}  ({ROWS}, {ABOUT})")
