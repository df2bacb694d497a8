"""Choose how many completions go through a forward and backward pass at once, from the GPU memory that is free.

This is needed if optim.micro_batch_size is null. Passes of growing size are measured before training. accelerate's
`find_executable_batch_size` does not serve: it lowers the size only after training has run out of memory, and by a
tenth, although the size must divide the completions of an update. TRL refuses it for GRPO.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import largest_divisor
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.gpu_memory import free_bytes
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine
from qerl_lab.train import out_of_memory
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, TrainingData

SHARE = 0.9  # of the free memory; the rest is for gaps between tensors of changing lengths, and for CUDA's workspaces
MOST_ON_CPU = RunConfig().optim.chosen_micro_batch_size  # torch does not measure memory there


def choose(cfg: RunConfig, policy: Policy, engine: Engine, data: TrainingData, ranks: Ranks) -> int:
    """Return a micro-batch size that fits into free memory on every rank: a divisor of the completions of an update.

    On a CPU it is at most `MOST_ON_CPU`. On a GPU see `choose_by_passes`.
    """
    if policy.device.type == "cpu":
        return largest_divisor(cfg.mini_batch_size_per_gpu, MOST_ON_CPU)
    return choose_by_passes(cfg, policy, engine, data, ranks)


def choose_by_passes(cfg: RunConfig, policy: Policy, engine: Engine, data: TrainingData, ranks: Ranks) -> int:
    """Measure training passes on the GPU, and return the largest micro-batch size that fits on every rank.

    The passes have completions of full length after the longest prompt. A size fits if its passes take at most
    `budget_bytes`. torch keeps the measured memory until the engine needs it, so that a second run does not count it as
    free meanwhile. Raises ConfigError on every rank if one completion does not fit.
    """
    one = cfg.with_micro_batch(1)
    with TemporaryDirectory() as folder:  # for the folder of checkpoints, which the trainer creates
        trainer = LabTrainer(one, policy, engine, Cursor(data), Path(folder), Stop(), ranks)

    def choose_here() -> int:
        budget = budget_bytes(cfg, policy)
        try:
            measure = partial(peak_bytes, trainer, data.longest_prompt)
            size = largest_fitting(cfg.mini_batch_size_per_gpu, budget, measure)
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()  # so that the message does not count the measured passes
            tokens = data.longest_prompt + cfg.rollout.max_completion_tokens
            raise ConfigError(
                f"The forward and backward pass of one completion of {tokens:,} tokens does not fit into the "
                f"{budget / GIB:.2f} GiB that are free for it. "
                f"{out_of_memory.message_in_training(one, policy, engine.memory_bytes(), error)}"
            ) from error
        torch.cuda.reset_peak_memory_stats(policy.device)  # `memory/gpu_peak_gib` counts training only
        return size

    return min(ranks.gather(ranks.run_on_all(choose_here, ConfigError)))


def budget_bytes(cfg: RunConfig, policy: Policy) -> int:
    """Return how many bytes of GPU memory training passes may take.

    This is `SHARE` of the free memory, less Adam's moments, which are made later. Keeps nothing for vLLM, which samples
    while torch holds no activations. With jobs_per_gpu jobs on the GPU, at most this job's part of the GPU counts,
    because the others may start later.
    """
    free = free_bytes(policy.device, cfg.jobs_per_gpu)
    trained = sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad)
    return max(0, int(SHARE * free) - trained * cfg.optim.moment_bytes)


def peak_bytes(trainer: LabTrainer, prompt_tokens: int, completions: int) -> float:
    """Run training passes with `completions` completions of full length, and return the bytes of GPU memory they take.

    Returns infinity if memory runs out, but for a single completion raises OutOfMemoryError. torch keeps the memory
    until its cache is emptied.
    """
    device = trainer.policy.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        trainer.run_dummy_pass(completions, prompt_tokens)
    except torch.OutOfMemoryError:
        if completions == 1:
            raise
        return math.inf
    return torch.cuda.max_memory_reserved(device) - before


def largest_fitting(completions: int, budget: int, measure: Callable[[int], float]) -> int:
    """Return the largest divisor of `completions` that fits: passes of that size take at most `budget` bytes.

    `measure` runs passes with a number of completions and returns the bytes that they take, infinite if memory runs
    out. Divisors are measured in rising order, until one does not fit or is expected not to. Bytes are expected to grow
    in proportion to the first measurement, later along the line through the first and the last. The result is measured
    last, because torch keeps that memory. Raises OutOfMemoryError if one completion takes more than `budget`.
    """
    size, first = 1, measure(1)
    if first > budget:
        raise torch.OutOfMemoryError(f"It takes {first / GIB:.2f} GiB.")
    peak = per_completion = first
    for larger in range(2, completions + 1):
        if completions % larger:
            continue
        if peak + per_completion * (larger - size) > budget:
            break
        measured = measure(larger)
        if measured > budget:
            measure(size)  # again, so that torch keeps no more
            break
        size, peak = larger, measured
        per_completion = (peak - first) / (size - 1)
    return size
