"""`python -m qerl_lab.evaluate accuracy`: ask benchmarks part by part, so that a stopped command can continue.

The files of an evaluation are written to OUT.partial, which is renamed to OUT when complete: eval.parquet with a row
per completion, evaluation.json with settings and results. Several evaluations of one run or model share its engines:
its own, which loads the base as stored, and with common=true the common one, which loads it dequantized to bfloat16.
"""

import hashlib
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab import formats, rollout
from qerl_lab.config.message import first_line
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.evaluate import benchmarks, subject, summary
from qerl_lab.evaluate.accuracy import ask_questions, evaluation_seed
from qerl_lab.evaluate.evaluate_options import AccuracyOptions
from qerl_lab.evaluate.subject import Subject
from qerl_lab.evaluate.summary import ABOUT, COMMON, OWN, ROWS, SCHEMA
from qerl_lab.model import policy
from qerl_lab.model.policy import Policy
from qerl_lab.model.weight_files import local_folder
from qerl_lab.record.environment import environment
from qerl_lab.record.partial import Unfinished
from qerl_lab.rollout.engine import Engine, EngineFailed, Sampling
from qerl_lab.system import terminal
from qerl_lab.system.disk import read_json, replace_file, strict_json
from qerl_lab.tasks import Question, Task


@dataclass(frozen=True)
class Part:
    """Questions of a benchmark that are asked together; `number` enters the draw's seed."""

    task: Task
    samples: int
    number: int
    questions: Sequence[Question]
    file: str  # with the answers


class Job:
    """One evaluation: what is asked of whom, and the directory that it writes."""

    def __init__(self, options: AccuracyOptions) -> None:
        """Load the questions. Raises ConfigError if the subject or a benchmark cannot be read, or `out` is taken."""
        self.options, self.subject = options, subject.resolve_subject(options)
        self.asked = benchmarks.load_benchmarks(options, self.subject.cfg)
        self.identity = identifying_settings(options, self.subject, self.asked)
        self.out = results_folder(options, self.subject, self.identity, self.asked)
        self.too_long: dict[str, int] = {}  # number of questions left out, by benchmark
        self.seconds = 0.0
        about = self.out / ABOUT
        self.is_done = about.is_file() and read_json(about, dict).get("identity") == self.identity
        if self.out.exists() and not self.is_done and not options.overwrite:
            raise ConfigError(
                f"out={self.out} holds something else. Type another out, or overwrite=true to replace it."
            )

    @property
    def engines(self) -> list[str]:
        """Engines to ask: the subject's own, and the common one if requested and different."""
        return [OWN, COMMON] if self.options.common and not self.subject.is_common else [OWN]

    def parts(self, engine: str, fitting: dict[str, list[Question]]) -> Iterator[Part]:
        """Split the questions into parts of about one generation batch; four batches for vLLM, which refills them."""
        cfg, how = self.subject.cfg, self.subject.sampling
        at_once = cfg.rollout.batch_size * (1 if cfg.rollout.engine == "transformers" else 4)
        for task in self.asked:
            questions = fitting[task.name]
            samples = how.samples_per_question(task.name, cfg.eval.samples)
            size = max(1, at_once // samples)
            for number, begin in enumerate(range(0, len(questions), size)):
                file = f"{engine}-{task.name}-{number:05d}.parquet"
                yield Part(task, samples, number, questions[begin : begin + size], file)


def run(*evaluations: AccuracyOptions) -> None:
    """Run evaluations on benchmarks: ask, grade, write and print. One that is complete already is only printed.

    Raises:
        ConfigError: the run or model cannot be evaluated, a benchmark cannot be read, or `out` has other settings.
        ValueError: the engine failed; finished parts are kept.
        OSError: the disk is full, or a file cannot be written.
    """
    jobs = list({job.out: job for job in map(Job, evaluations)}.values())
    left = [job for job in jobs if not job.is_done]
    groups = [list(group) for _, group in itertools.groupby(left, lambda job: (job.subject.cfg, job.subject.adapter))]
    with ExitStack() as stack:
        folders = {
            job.out: stack.enter_context(Unfinished(job.out, job.identity, job.options.overwrite)) for job in left
        }
        for group, engine in itertools.product(groups, (OWN, COMMON)):
            if asked := [job for job in group if engine in job.engines]:
                with loaded_sampler(group[0].subject, engine) as (loaded, sampler):
                    for job in asked:
                        answer_missing_parts(job, engine, loaded, sampler, folders[job.out])
        for job in left:
            write_results(job, folders[job.out])
    for job in jobs:
        print_results(job.out, "was evaluated before" if job.is_done else "is evaluated")


@contextmanager
def loaded_sampler(chosen: Subject, engine: str) -> Iterator[tuple[Policy, Engine]]:
    """Context manager: load the subject, for the common engine dequantized; yield policy and engine without noise."""
    with ExitStack() as stack:
        one = chosen if engine == OWN else stack.enter_context(subject.dequantized_subject(chosen))
        loaded = subject.load_policy(one)
        yield loaded, stack.enter_context(closing(rollout.build(one.cfg, loaded)))


def identifying_settings(options: AccuracyOptions, chosen: Subject, asked: Sequence[Task]) -> dict[str, Any]:
    """Return the settings of an evaluation that determine its answers, by option name."""
    cfg, how, device = chosen.cfg, chosen.sampling, policy.device_of(chosen.cfg.device)
    return {
        "weights": {"hash": model_hash(local_folder(cfg.model.path, cfg.model.revision))},  # wherever it was copied to
        "format": cfg.format.name,
        "format_options": asdict(formats.build(cfg.format)) | {"ignore": cfg.format.ignore},
        "lora": [cfg.lora.rank, cfg.lora.alpha], "adapter": chosen.adapter_sha256,
        "rollout": cfg.rollout.engine, "device": device.type, "dtype": str(policy.compute_dtype(cfg, device)),
        "batch_size": cfg.rollout.batch_size, "common": options.common,
        "benchmarks": {task.name: benchmarks.about(task) for task in asked}, "questions": options.questions,
        "seed": cfg.seed, "max_prompt_tokens": cfg.rollout.max_prompt_tokens,
        "samplings": {how.name: {task.name: how.samples_per_question(task.name, cfg.eval.samples) for task in asked}},
    }  # fmt: skip


def results_folder(options: AccuracyOptions, chosen: Subject, identity: Any, asked: Sequence[Task]) -> Path:
    """Return where results go: `out`, else a folder named by a hash of the settings, below the run or ./evaluations."""
    if options.out:
        return Path(options.out).expanduser().absolute()
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    above = Path(options.run).expanduser() if options.run else Path()
    below = Path("evaluations") if options.run else Path("evaluations") / chosen.cfg.model.name
    return (above / below / f"{'+'.join(task.name for task in asked)}-{key}").absolute()


def answer_missing_parts(job: Job, engine: str, loaded: Policy, sampler: Engine, unfinished: Unfinished) -> None:
    """Ask one engine the parts of an evaluation that are not answered yet, and store the answers."""
    started = time.time()
    limit = job.subject.cfg.rollout.max_prompt_tokens
    fitting = {task.name: benchmarks.fitting_questions(task, loaded, limit) for task in job.asked}
    job.too_long = {task.name: len(task.heldout) - len(fitting[task.name]) for task in job.asked}
    parts = list(job.parts(engine, fitting))
    left = [part for part in parts if not unfinished.has(part.file)]
    total, ahead = (sum(len(part.questions) * part.samples for part in some) for some in (parts, left))
    with terminal.Amount(f"{engine} engine", total, total - ahead, unit="completion") as bar:
        for part in left:
            rows = ask_part(job.subject, part, engine, loaded, sampler, bar)
            replace_file(unfinished.folder / part.file, rows.to_parquet(index=False))
            unfinished.note(part.file)
    job.seconds += time.time() - started


def ask_part(
    chosen: Subject, part: Part, engine: str, loaded: Policy, sampler: Engine, bar: terminal.Amount
) -> pd.DataFrame:
    """Sample and grade the completions of one part of the questions; return a row per completion.

    The sampling seed is the same for all arms and engines.
    """
    task, how = part.task, chosen.sampling
    seed = evaluation_seed(chosen.cfg.seed, task.name, part.number)
    sampling = Sampling(how.max_completion_tokens, seed, how.temperature, how.top_p)
    try:
        rows = ask_questions(sampler, loaded, task, part.questions, part.samples, sampling, bar.advance).rows
    except EngineFailed as error:
        raise ValueError(f"{first_line(error)} The same command goes on where it stopped.") from error
    prompts = [hashlib.sha256(json.dumps(task.messages(one)).encode()).hexdigest()[:16] for one in part.questions]
    columns = {
        "benchmark": task.name, "engine": engine, "sampling": how.name,
        "prompt_sha256": [prompt for prompt in prompts for _ in range(part.samples)],
    }  # fmt: skip
    return pd.concat([pd.DataFrame(columns, index=rows.index), rows], axis=1)


def write_results(job: Job, unfinished: Unfinished) -> None:
    """Join the parts, own engine before common; write both result files; rename the folder to its final name."""
    found, folder = job.subject, unfinished.folder
    files = sorted(folder.glob("*-*-*.parquet"))
    rows = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    rows = rows.sort_values("engine", ascending=False, kind="stable", ignore_index=True)
    about = {
        "schema": SCHEMA,
        "identity": job.identity,
        "subject": found.said,
        "model": {"path": found.cfg.model.path, "revision": found.cfg.model.revision},
        "run_seed": found.run_seed,
        "arm": found.arm,
        "own_is_common": found.is_common,
        "notes": list(notes_below_table(job)),
        "benchmarks": {task.name: benchmarks.about(task) | {"too_long": job.too_long[task.name]} for task in job.asked},
        "results": summary.summarize_each(rows),
        "seconds": round(job.seconds, 1),
        "environment": environment(),
    }
    replace_file(folder / ROWS, rows.to_parquet(index=False))
    replace_file(folder / ABOUT, strict_json(about))
    for file in files:
        file.unlink()
    unfinished.finish()


def notes_below_table(job: Job) -> Iterator[str]:
    """Yield the notes to print below the table."""
    found, cfg = job.subject, job.subject.cfg
    for task in job.asked:
        yield from (f"{task.name}: {line}" for line in task.warnings)
        if count := job.too_long[task.name]:
            limit = cfg.rollout.max_prompt_tokens
            yield f"{task.name}: {count} questions are longer than max_prompt_tokens={limit}, and left out"
    if job.options.common and found.is_common:
        yield f"its own engine is the common one: {cfg.format.name} is dense"


def print_results(folder: Path, state: str) -> None:
    """Print the table and notes of a finished evaluation, and the folder with its answers."""
    about = read_json(folder / ABOUT, dict)
    identity = about["identity"]
    print(f"{about['subject']} {state}: {identity['format']}, {identity['rollout']}, no noise, seed {identity['seed']}")
    print(f"sampling: {'; '.join(identity['samplings'])}\n")
    print(summary.table(about["results"]))
    for note in about["notes"]:
        print(f"note: {note}")
    print(f"\nanswers: {terminal.format_path(folder)}  ({ROWS}, {ABOUT})")
