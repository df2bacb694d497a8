"""One run, from its configuration to its record: build -> evaluate -> train -> evaluate -> record.

    python -m qerl_lab.experiment RUN_DIR

RUN_DIR holds `resolved.yaml`; `python -m qerl_lab` writes it and starts this in a process of its own. A directory that
already holds checkpoints is continued from the newest sound one. Leaves DONE (the summary, JSON) or FAILED (the
reason, then the traceback); after SIGINT or SIGTERM neither, and exit status 130.
"""

import json
import shlex
import sys
import time
import traceback
from pathlib import Path

import torch
import yaml

from qerl_lab import checkpoint, formats, policy, progress, record, tasks
from qerl_lab.algorithms import lacks
from qerl_lab.config import ConfigError, RunConfig, from_dict
from qerl_lab.evaluate import evaluate
from qerl_lab.report import plots, runs, tables
from qerl_lab.rollout import Engine
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.tracking import Tracker
from qerl_lab.trainer import LabTrainer, Stop

OK, FAILURE, INTERRUPTED = 0, 1, 130


def run(cfg: RunConfig, run_dir: Path) -> int:
    """Build everything, then `learn`. Returns the exit status: 0 done, 130 interrupted."""
    stop = Stop.on_signals()
    progress.quiet_third_parties()
    if cfg.cpu_threads:
        torch.set_num_threads(cfg.cpu_threads)

    # Build, from what a resumed run takes over.
    saved = checkpoint.newest(run_dir / "checkpoints")
    done = saved.step if saved else 0
    task = tasks.load(cfg.task)
    learner = policy.build(cfg, policy.device_of(cfg.device))
    engine = TransformersEngine(learner, cfg.rollout.batch_size)
    record.write_environment(run_dir)
    print(opening(cfg, learner, task, done), flush=True)
    with Tracker(cfg, run_dir, run_id=saved.mlflow_run_id if saved else None, last_step=done) as tracker:
        return learn(cfg, run_dir, task, learner, engine, tracker, saved, stop)


def learn(
    cfg: RunConfig, run_dir: Path, task: tasks.Task, learner: policy.Policy, engine: Engine, tracker: Tracker,
    saved: checkpoint.Saved | None, stop: Stop,
) -> int:  # fmt: skip
    """Evaluate, train, evaluate, record."""
    started, done = time.time(), saved.step if saved else 0

    def ask_heldout(phase: str, step: int) -> None:
        """Evaluate, unless metrics.jsonl has it: that line is written last, and is cut with steps to train again."""
        recorded = any(at["step"] == step and "eval/accuracy" in at["metrics"] for at in record.read_metrics(run_dir))
        if cfg.eval.questions and not recorded:
            found = evaluate(engine, learner, task, cfg)
            runs.write_phases(run_dir, runs.read_phases(run_dir) | {phase: found.rows})
            tracker.log(step, found.metrics)

    # Ask the held-out questions of the policy as quantization left it: no adapter yet, no noise.
    ask_heldout("before", 0)

    # Train. A signal lets the step under way end, saves, and stops.
    bar = progress.Progress(cfg.steps, done)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        tracker.log(step, metrics)
        bar.show(step, metrics)

    trainer = LabTrainer(cfg, learner, engine, task, run_dir, on_step, stop)
    trainer.run_id = lambda: tracker.run_id
    if saved and done == cfg.steps:  # killed after the last step: only what follows is missing
        policy.load_adapter(learner.model, saved.path)
    elif not stop.requested:
        trainer.train(resume_from_checkpoint=str(saved.path) if saved else None)
        done = trainer.steps_done
    bar.close()
    if done < cfg.steps:
        tracker.finish("KILLED")
        print(f"interrupted after step {done} of {cfg.steps}; continue with\n"
              f"  {tables.python()} -m qerl_lab resume={shlex.quote(tables.near(run_dir))}")  # fmt: skip
        return INTERRUPTED

    # Ask them again of what was learned: with the adapter, no noise.
    engine.sync(learner, None)
    ask_heldout("after", cfg.steps)
    engine.close()

    # Record.
    policy.save_adapter(learner.model, run_dir / "adapter")
    plots.save_curves(runs.read_steps(run_dir), f"{cfg.experiment}, seed {cfg.seed}", run_dir / "curves.png")
    result = runs.summarize(run_dir, seconds=time.time() - started)
    tracker.finish(
        "FINISHED", [run_dir / name for name in ("resolved.yaml", "metrics.jsonl", "eval.parquet", "curves.png")]
    )
    record.replace_file(run_dir / "DONE", json.dumps(result, indent=1).encode())
    print(f"\n{tables.closing(result)}\n\n{tables.where(run_dir, tracker.uri)}")
    return OK


def opening(cfg: RunConfig, learner: policy.Policy, task: tasks.Task, done: int) -> str:
    """What is about to run, in a few lines."""
    bits = formats.codec(cfg.format.name).bits_per_weight(**policy.format_options(cfg))
    weights = f"{bits:.2f} bits a weight, {formats.weight_bytes(learner.model).linears / 2**20:.2f} MiB"
    trainable = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    noise = (
        "no AQN"
        if cfg.aqn.schedule == "off"
        else f"AQN {cfg.aqn.schedule} {cfg.aqn.sigma_start:g} -> {cfg.aqn.sigma_end:g}"
    )
    lines = [
        f"{cfg.experiment}: {cfg.model.name} in {cfg.format.name} ({weights}), {noise}, on {learner.device}",
        f"{cfg.algorithm.name}, LoRA rank {cfg.lora.rank} ({trainable:,} parameters), "
        f"{task.name} with {len(task.train):,} questions",
        f"{cfg.steps} steps of {cfg.rollout.prompts_per_step} x {cfg.rollout.group_size} completions, seed {cfg.seed}",
    ]
    if lack := lacks(cfg.algorithm):
        lines.append(f"note: {lack}")
    if done:
        lines.append(f"continuing after step {done}")
    return "\n".join(lines)


def main(run_dir: Path) -> int:
    """Run what `run_dir` holds; on an exception leave FAILED and return 1."""
    try:
        cfg = from_dict(yaml.safe_load((run_dir / "resolved.yaml").read_text()))
        return run(cfg, run_dir)
    except Exception as error:  # the boundary of the process: every reason ends up in FAILED
        (run_dir / "FAILED").write_text(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}")
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        return FAILURE


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
