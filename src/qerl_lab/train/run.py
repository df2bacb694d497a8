"""Run from configuration to record: build -> evaluate -> train -> evaluate -> record.

A run resumes from the newest intact checkpoint in its directory, if there is one.
"""

import shutil
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from qerl_lab import aqn, formats, preflight, rollout, tasks
from qerl_lab.config.arm import settings_of_run
from qerl_lab.config.message import first_line, with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import adapter_folder
from qerl_lab.config.schema import DENSE_FORMAT, AqnConfig, RunConfig, TaskConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.evaluate import accuracy
from qerl_lab.model import adapter_files, dense, linear, on_disk
from qerl_lab.model.gpu_memory import limit_to_part
from qerl_lab.model.policy import Policy, device_of, load_adapter
from qerl_lab.model.policy import build as build_policy
from qerl_lab.model.weight_files import local_folder
from qerl_lab.preflight import question_counts
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import code_hash
from qerl_lab.record.line_files import PER_STEP, Sample
from qerl_lab.report import run_summary, runs
from qerl_lab.rollout.engine import Engine, EngineFailed
from qerl_lab.system import terminal
from qerl_lab.system.exits import INTERRUPTED, OK
from qerl_lab.tasks.module_file import GraderFailed
from qerl_lab.tracking.tracker import Tracker
from qerl_lab.train import health, micro_batch, out_of_memory
from qerl_lab.train.ranks import Ranks, join
from qerl_lab.train.stop import Diverged, Interrupted, Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, TrainingData, select


@dataclass
class Session:
    """All parts of a run in one process.

    Attributes:
        cfg: the recorded configuration, in which optim.micro_batch_size may be null.
        sized_cfg: the same with a micro-batch size; where `cfg` has null, it is 1 until `run` has chosen one.
        saved: the checkpoint to resume from; None for a new run.
        model_folder: the local folder of the base model.
        notes: lines to print for the user.
        tracker: writes the record; only rank 0 has one.
    """

    cfg: RunConfig
    sized_cfg: RunConfig
    directory: RunDirectory
    stop: Stop
    ranks: Ranks
    saved: checkpoint.Saved | None
    model_folder: Path
    policy: Policy
    data: TrainingData
    engine: Engine
    notes: list[str]
    tracker: Tracker | None = None

    @property
    def resumed_from(self) -> int:
        """Return the step of the checkpoint that this session resumes from; 0 for a new run."""
        return self.saved.step if self.saved else 0

    def raise_if_stopped(self) -> None:
        """Raise Interrupted on every rank if any rank was asked to stop."""
        if self.ranks.any(self.stop.requested):
            raise Interrupted


def run(cfg: RunConfig, directory: RunDirectory, stop: Stop) -> int:
    """Do a whole run: build, evaluate, train, evaluate, record. Return the exit code: 0 done, 130 interrupted.

    Raises ConfigError if the run cannot start. Raises EngineFailed if the engine fails; the message has the command
    that resumes the run. Raises OutOfMemoryError if memory runs out; the message says what holds it.
    """
    started, code = time.time(), code_hash()  # now, because source files may be edited while the model loads
    session = build_session(cfg, directory, stop)
    ranks, saved, engine = session.ranks, session.saved, session.engine
    with ExitStack() as closing:
        closing.callback(close_engine, engine)
        stop.can_save = True
        if ranks.any(stop.requested):  # killed while loading: nothing to record
            return INTERRUPTED
        try:
            # As typed, or as in the checkpoint, so that a resumed run repeats its sums; else chosen from free memory.
            micro_batch_size = cfg.optim.micro_batch_size or (saved.micro_batch_size if saved else None)
            if micro_batch_size is None:
                micro_batch_size = micro_batch.choose(cfg, session.policy, engine, session.data, ranks)
            session.sized_cfg = cfg.with_micro_batch(micro_batch_size)
            if ranks.is_first:
                data = session.data.task.data
                downloaded = session.model_folder if on_disk.is_on_hub(cfg.model.path) else None
                directory.write_environment(
                    data, engine.linear_backend, micro_batch_size, cfg.task.module, code, downloaded
                )
                directory.begin_session(started)
                print(opening_lines(session), flush=True)
                tracker = Tracker(cfg, directory, parts=session.data.task.weights, last_step=session.resumed_from)
                session.tracker = closing.enter_context(tracker)
            session.raise_if_stopped()
            # the quantized model: no trained adapter, no noise
            evaluate_heldout(session, "before", 0, cfg.eval.questions, cfg.eval.samples_before or cfg.eval.samples)
            evaluate_subset(session, 0)
            session.raise_if_stopped()
            train(session)
            session.raise_if_stopped()
            # with the adapter, no noise
            evaluate_heldout(session, "after", cfg.steps, cfg.eval.questions, cfg.eval.samples)
        except (Interrupted, EngineFailed) as error:
            if isinstance(error, Interrupted) or stop.requested:  # a signal may have killed the engine first
                ranks.leave()
                if session.tracker:
                    session.tracker.finish("KILLED")
                    directory.end_session()
                return INTERRUPTED
            raise EngineFailed(
                f"{first_line(error).rstrip('.')}. {directory.last_saved()} of {cfg.steps} steps are saved. "
                f"Type python -m qerl_lab {resume_override(cfg.run_dir)} to go on."
            ) from error
        except torch.OutOfMemoryError as error:
            message = out_of_memory.message_in_training(session.sized_cfg, session.policy, engine.memory_bytes(), error)
            raise torch.OutOfMemoryError(message) from error
        ranks.leave()
        if session.tracker:
            conclude(session, session.tracker)
        return OK


def close_engine(engine: Engine) -> None:
    """Close the engine. If closing fails, print the error: raising it would hide the error that ended the run."""
    try:
        engine.close()
    except Exception as error:
        terminal.say(f"warning: the engine could not be closed ({type(error).__name__}: {first_line(error)}).")


def build_session(cfg: RunConfig, directory: RunDirectory, stop: Stop) -> Session:
    """Build the policy, engine and data of a run.

    Raises ConfigError if model, data, grader or device do not fit `cfg`. Also raises it if `cfg`, data or device
    differ from what an earlier session of the run recorded in `directory`.
    """
    if cfg.cpu_threads:
        torch.set_num_threads(cfg.cpu_threads)
    device = device_of(cfg.device)
    preflight.check_engine_here(cfg)
    ranks = join(cfg, device)
    limit_to_part(device, cfg.jobs_per_gpu)  # of this rank's GPU, which `join` has chosen
    saved = directory.starting_point()
    if ranks.is_first:
        checkpoint.set_damaged_aside(directory.checkpoints, saved.step if saved else 0)
    on_disk.check_content(cfg)
    model_folder = local_folder(cfg.model.path, cfg.model.revision)
    directory.refuse_other_model(model_folder)
    on_disk.check(model_folder, cfg)  # for a model just downloaded
    task = tasks.load(cfg.task)
    directory.refuse_other_data(task.data)  # also without a checkpoint: an evaluation may be recorded already
    notes = [*task.warnings, *question_counts.check_counts(cfg, len(task.train), len(task.heldout))]
    if question_counts.are_questions_here(cfg):  # then the command has printed them, before it started this process
        notes = []
    if cfg.task.module and not saved:  # a run with a checkpoint has graded already, perhaps never an empty text
        try:  # report a mistake in the user's file before the model loads
            task.grade([""], task.train[:1])
        except (ConfigError, GraderFailed) as error:
            raise ConfigError(f"{error} This was a trial with one empty text, before the model loads.") from error
    directory.refuse_other_device(device.type)
    try:
        policy = build_policy(cfg, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(out_of_memory.message_while_loading(cfg, device, error)) from error
    if cfg.lora.start_from:  # before the first evaluation, which uses this adapter
        load_adapter(policy.model, adapter_folder(cfg.lora.start_from))
    policy.chat.day = ranks.broadcast(directory.first_day())
    data = select(cfg, policy, task)
    if saved and saved.step in cfg.extended:
        notes.append(
            f"extended from {saved.step} to {cfg.steps} steps, over which the schedules of noise and learning rate "
            f"now stretch: a run of {cfg.steps} steps from the start would differ"
        )
    if not saved and cfg.lora.start_from:
        kl = ", and algorithm.beta weighs the KL to the base without it" if cfg.algorithm.beta else ""
        base = adapter_files.base_of(adapter_folder(cfg.lora.start_from))
        made_on = f" that was trained on {base}" if base else ""  # nothing shows whether this is the run's model
        notes.append(f"begins with the adapter of {cfg.lora.start_from} ({cfg.lora.start_hash}){made_on}{kl}")
    for count, what in ((data.left_out, "more question"), (data.heldout_left_out, "held-out question")):
        if count:
            limit = f"rollout.max_prompt_tokens={cfg.rollout.max_prompt_tokens}"
            are = f"{what} is" if count == 1 else f"{what}s are"
            notes.append(f"{count:,} {are} longer than {limit}, and left out")
    notes += policy.chat.notes
    if policy.base_dropout:
        rates = ", ".join(f"{key}={rate:g}" for key, rate in policy.base_dropout.items())
        notes.append(
            f"the model's config.json has dropout ({rates}), which acts in training only: the loss is of another "
            "policy than the one that samples. Set it to 0 there to train without"
        )
    sized_cfg = cfg.with_micro_batch(cfg.optim.micro_batch_size or 1)
    engine = rollout.build(cfg, policy)
    return Session(cfg, sized_cfg, directory, stop, ranks, saved, model_folder, policy, data, engine, notes)


def evaluate_subset(session: Session, step: int) -> None:
    """Evaluate on the first eval.subset_questions held-out questions if eval.every is not 0 and divides `step`."""
    settings = session.cfg.eval
    if settings.every and step % settings.every == 0:
        evaluate_heldout(session, f"step {step}", step, settings.subset_questions, settings.subset_samples)


def evaluate_heldout(session: Session, phase: str, step: int, questions: int, samples: int) -> None:
    """Answer and grade the first `questions` held-out questions without noise, `samples` times each, and record it.

    Does nothing if `questions` is 0, or if the evaluation is recorded already. Rank 0 writes the answers of all ranks
    to eval.parquet under `phase` ("before" or "after" training, or "step N"), then their means to metrics.jsonl under
    `step`. A resume from a checkpoint before `step` deletes this line of metrics.jsonl. Raises Interrupted,
    EngineFailed or Diverged on every rank if any rank raises it.
    """
    directory, ranks = session.directory, session.ranks
    is_subset = phase.startswith("step ")
    prefix, when = ("eval/subset_", f"after {phase}") if is_subset else ("eval/", f"{phase} training")
    rows_by_phase, is_logged = {}, False
    if session.tracker:
        rows_by_phase, metric = directory.evaluations(), f"{prefix}accuracy"
        is_logged = any(line["step"] == step and metric in line["metrics"] for line in directory.metrics())
    if not questions or ranks.broadcast(is_logged and phase in rows_by_phase):
        return
    questions = min(questions, len(session.data.task.heldout))
    ask = partial(ask_own_share, session, questions, samples, when)
    own_rows = ranks.run_on_all(ask, Interrupted, EngineFailed, Diverged)
    rows_of_ranks = ranks.gather(own_rows)
    if session.tracker:
        rows = pd.concat(rows_of_ranks, ignore_index=True)
        directory.write_evaluations(rows_by_phase | {phase: accuracy.by_question(rows)})
        if not is_logged:
            gain = runs.gain_metrics(directory) if phase == "after" else {}
            session.tracker.log(step, accuracy.metrics(rows, prefix) | gain)


def ask_own_share(session: Session, questions: int, samples: int, when: str) -> pd.DataFrame | None:
    """Ask and grade this rank's share of the first `questions` held-out questions; return None if the share is empty.

    Returns rows as `accuracy.ask_questions` does. Samples without noise. `when` completes the title of the progress
    bar. Raises Interrupted if the run is asked to stop meanwhile, and Diverged if the sampler's logits are NaN.
    """
    cfg, share, completions_of_all = session.cfg, session.ranks.share(questions), questions * samples
    if not share:
        return None
    session.engine.sync(aqn.CLEAN)
    with terminal.ProgressBar(f"held-out questions {when}", completions_of_all, unit="completion") as bar:

        def advance(completions: int) -> None:  # rank 0's progress bar extrapolates to all ranks
            bar.advance(min(completions * session.ranks.size, completions_of_all - bar.now))
            session.stop.raise_if_requested()

        try:
            return accuracy.evaluate(session.engine, session.policy, session.data.task, cfg, share, samples, advance)
        except FloatingPointError as error:
            remedy = f"a lower optim.learning_rate (it is {cfg.optim.learning_rate:g})"
            if when == "before training":
                remedy = "model.dtype=float32, or another model or format"
            raise Diverged(f"{error} in the evaluation {when}. Type {remedy}.") from error


def train(session: Session) -> None:
    """Train the remaining steps; record every step, evaluate every few steps.

    On a signal it saves a checkpoint after the current step and returns.
    """
    cfg, policy, saved, tracker = session.cfg, session.policy, session.saved, session.tracker
    if saved and saved.step == cfg.steps:  # killed after the last step: only evaluation is missing
        policy.load_trained(saved.path)
        evaluate_subset(session, saved.step)
        return
    cursor = Cursor(session.data, saved.prompts_seen if saved else 0)
    trainer = LabTrainer(
        session.sized_cfg, policy, session.engine, cursor, session.directory.path, session.stop, session.ranks
    )
    if saved:
        trainer.level.state = dict(saved.noise)

    def evaluate_after_step(step: int) -> None:
        try:
            evaluate_subset(session, step)
        except Interrupted:  # save the finished step; resuming repeats the evaluation
            trainer.control.should_save = trainer.control.should_training_stop = True
        except EngineFailed:  # the Trainer saves only after this hook
            trainer.save_finished_steps()
            raise

    trainer.after_step = evaluate_after_step
    with ExitStack() as shown:
        if tracker:
            bar = shown.enter_context(terminal.TrainingProgress(cfg.steps, session.resumed_from))
            record_steps(session, tracker, trainer, bar)
        if saved:
            policy.load_trained(saved.path)  # only now: the trainer may copy the initial adapter as KL reference
            evaluate_subset(session, saved.step)
        trainer.train(resume_from_checkpoint=str(saved.path) if saved else None)


def record_steps(session: Session, tracker: Tracker, trainer: LabTrainer, bar: terminal.TrainingProgress) -> None:
    """Make `trainer` record each step, show it on `bar`, warn of trouble, and put the settings into checkpoints."""
    directory = session.directory
    watch = health.Watch(session.cfg, [line["metrics"] for line in directory.metrics()])

    def record_step(step: int, metrics: dict[str, float]) -> None:
        tracker.log(step, metrics)
        directory.append_samples([
            Sample(
                step=step, question_id=group.question.id, question=group.question.prompt, completion=group.texts_G[0],
                rewards={name: float(part[0]) for name, part in group.parts.items()}, finished=group.finished_G[0],
            )
            for group in trainer.batch.groups[:PER_STEP]
        ])  # fmt: skip
        bar.show(step, metrics)
        for sign, advice in watch.add_step(metrics).items():
            terminal.say(f"warning, step {step}: {sign}. {advice}")

    trainer.on_step, trainer.settings = record_step, settings_of_run(session.cfg)


def conclude(session: Session, tracker: Tracker) -> None:
    """Complete a finished run: save its results, then print its summary.

    Saves the adapter (with lora=full the whole model), the curves, and the file DONE with the headline numbers. With
    checkpoint.keep=0 it then deletes the checkpoints.
    """
    cfg, directory, data = session.cfg, session.directory, session.data
    if cfg.trains_all:
        tensors = dense.base_tensors(session.policy)
        dense.write_model(tensors, torch.bfloat16, session.model_folder, directory.model)
    else:
        session.policy.save_trained(directory.adapter)
    from qerl_lab.report import plots  # here, so that the first step does not wait a second for matplotlib

    title = f"{cfg.experiment}: {cfg.model.name} on {task_in_words(cfg.task)}, seed {cfg.seed}"
    steps = runs.read_steps(directory)
    plots.save_curves(steps, title, directory.curves, cfg.format.name)
    result = runs.summarize(steps, directory.evaluations(), seconds=directory.end_session()) | {
        "training_questions": len(data.questions),
        "training_questions_left_out": data.left_out,
        "heldout_questions_left_out": data.heldout_left_out,
    }
    tracker.finish("FINISHED", result)
    directory.finish(result)
    if cfg.checkpoint.keep == 0:
        shutil.rmtree(directory.checkpoints, ignore_errors=True)  # the run stays done, whatever remains
    print(
        f"\n{run_summary.closing_table(result, steps)}\n\n{run_summary.location(directory.path, tracker.is_mirrored)}"
    )
    print(run_summary.next_steps(directory.path), flush=True)


def opening_lines(session: Session) -> str:
    """Return the text printed before training: model, noise, algorithm, task and sizes, then the session's notes."""
    cfg, policy, data = session.cfg, session.policy, session.data
    bits = formats.build(cfg.format).bits_per_weight
    weights = f"{bits:.2f} bits a weight, {linear.linear_bytes(policy.model) / 2**20:.2f} MiB"
    if cfg.format.name == DENSE_FORMAT and policy.model.dtype == torch.float32:
        weights += " in float32"  # as on a CPU, in twice the bytes of the format
    trainable = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    trained = "all weights in float32" if cfg.trains_all else f"LoRA rank {cfg.lora.rank}"
    gpu = f" ({torch.cuda.get_device_name(policy.device)})" if policy.device.type == "cuda" else ""
    processes = f", {cfg.gpus} processes" if cfg.gpus > 1 else ""
    lines = [
        f"{cfg.experiment} at scale {cfg.scale}: {cfg.model.name} in {cfg.format.name} ({weights}), "
        f"{noise_line(cfg.aqn)}, on {policy.device}{gpu}{processes}",
        f"{cfg.algorithm.name}, {trained} ({trainable:,} parameters), "
        f"learning rate {cfg.optim.learning_rate:g}, {task_in_words(cfg.task)} with {len(data.questions):,} questions",
        f"{with_noun(cfg.steps, 'step')} of {cfg.rollout.prompts_per_step} x {cfg.rollout.group_size} completions "
        f"of at most {cfg.rollout.max_completion_tokens:,} tokens, "
        f"micro-batches of {session.sized_cfg.optim.micro_batch_size}, seed {cfg.seed}",
    ]
    if session.resumed_from:
        lines.append(f"continuing after step {session.resumed_from}")
    if policy.device.type == "cuda":
        from qerl_lab.rollout.vllm import backends  # imports triton

        lines += backends.describe_gpu()
    lines += [f"note: {note}" for note in session.notes]
    return "\n".join(lines)


def task_in_words(cfg: TaskConfig) -> str:
    """Return the task's name, with the name of the user's file that replaces parts of it: `gsm8k by FILE.py`."""
    return cfg.name + (f" by {Path(cfg.module).name}" if cfg.module else "")


def noise_line(cfg: AqnConfig) -> str:
    """Return the noise of a run in words: its schedule, with sigma or KL in the first noisy and in the last stage.

    "0, then" stands before them if the first stage has no noise. The last stage has sigma_end or kl_end, but not with
    reading=algorithm, nor if it is the only noisy stage.
    """
    if cfg.schedule == "off":
        return "no AQN"
    of_norms = " of each norm's size" if cfg.relative else ""
    if cfg.schedule == "adaptive":
        return f"AQN adaptive, KL {cfg.kl_start:g} nats, from sigma {cfg.sigma_start:g}{of_norms}"
    first, last = (aqn.level(cfg, stage, cfg.stages) for stage in (1, cfg.stages))
    before = "" if first else "0, then "
    if cfg.unit == "kl":
        return f"AQN {cfg.schedule}, KL {before}{cfg.kl_start:g} -> {last:g} nats"
    return f"AQN {cfg.schedule} {before}{cfg.sigma_start:g} -> {last:g}{of_norms}"
