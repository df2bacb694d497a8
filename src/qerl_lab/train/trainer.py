"""The shared training loop: TRL's GRPOTrainer, driven by a policy, an engine, a task and an algorithm.

A *step* is one batch of `step.collect` and the optimizer updates on it; TRL's `global_step` counts updates. Nothing is
patched: TRL's rollout and reward functions return what `collect` stored, TRL's vLLM switch keeps the sampler's
log-probs, and overridden methods add correction, clocks, noise and atomic checkpoints.

Correction for noisy sampling needs the trainer's log-probs of the rollout. With one update per rollout and no dropout
the forward pass of the loss gives them, and `_get_per_token_logps_and_entropies` corrects. Otherwise TRL computes them
in an extra forward pass before the first update, and corrects.
"""

import math
import resource
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from qerl_lab import aqn
from qerl_lab.algorithms import correction
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy
from qerl_lab.record import checkpoint
from qerl_lab.record.metrics import METRICS, PHASES
from qerl_lab.rollout.engine import Engine, EngineFailed, Rollout
from qerl_lab.system import terminal
from qerl_lab.train import packing
from qerl_lab.train.ahead import Ahead, may_be_sampled_ahead, sample_ahead
from qerl_lab.train.grpo_config import grpo_config
from qerl_lab.train.noise_level import NoiseLevel, build_kl_measure, probe
from qerl_lab.train.ranks import ALONE, Ranks
from qerl_lab.train.step import Batch, Clock, collect, completion_metrics
from qerl_lab.train.step_callback import StepCallback
from qerl_lab.train.stop import Diverged, Stop
from qerl_lab.train.training_data import Cursor


class LabTrainer(GRPOTrainer):
    """Trainer of one run. Callers may replace its hooks.

    Attributes:
        on_step: called after every step with the step and all its metrics.
        after_step: called after `on_step` with the step, on every rank, before the checkpoint.
        settings: of the run (`arm.settings_of_run`), to store in its checkpoints.
    """

    def __init__(
        self, cfg: RunConfig, policy: Policy, engine: Engine, cursor: Cursor, run_dir: Path, stop: Stop,
        ranks: Ranks = ALONE,
    ) -> None:  # fmt: skip
        self.cfg, self.policy, self.engine, self.cursor = cfg, policy, engine, cursor
        self.stop, self.ranks = stop, ranks
        self.on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None
        self.after_step: Callable[[int], None] = lambda step: None
        self.settings: dict[str, Any] = {}
        device_done = torch.cuda.synchronize if policy.device.type == "cuda" else lambda: None
        self.clock = Clock(device_done, ranks)
        self.level = NoiseLevel(cfg)  # sigma of each step
        self.packs = packing.should_pack(cfg, policy.base)
        self.batch = Batch([], np.zeros((0, 0)), [], [])  # from the last rollout
        self.ahead: Ahead | None = None  # the next step's batch, while a thread samples it
        self.measured: dict[str, float] = {}
        self.loss_tokens: list[float] = []  # per micro-batch
        self.entropies: list[Tensor] = []  # of each completion token, per micro-batch
        self.mismatch_sums: list[Tensor] = []  # `correction.mismatch_sums`, per micro-batch
        self.until_backward = ExitStack()  # contexts open from a loss to the end of its backward pass
        self.micro_batch: dict[str, Tensor] = {}  # the one that the loss is computed on
        self.scored_before = False  # whether a forward before the updates computed the rollout's log-probs
        super().__init__(
            model=policy.model,
            reward_funcs=self._collected_reward,
            args=grpo_config(cfg, policy, run_dir),
            train_dataset=Dataset.from_dict({"prompt": [""]}),  # placeholder: the cursor supplies the questions
            processing_class=policy.tokenizer,
            callbacks=[StepCallback(cfg, self.clock, self.level, stop, ranks)],
        )
        self.remove_callback(PrinterCallback)
        if self.beta:  # without its "ref" adapter TRL disables the adapter, so that the base is the reference
            self.policy.model.delete_adapter("ref")
        # Set here, because the constructor would look for vLLM and warn that `rollout_func` is experimental. TRL keeps
        # the sampler's log-probs only if it takes the sampler for vLLM, so `use_vllm` is True with every engine.
        self.use_vllm, self.rollout_func = True, self._collected_rollout

    @property
    def steps_done(self) -> int:
        """Return the number of finished steps; a step is finished when all its optimizer updates are done."""
        return self.state.global_step // self.cfg.updates_per_step

    @property
    def step(self) -> int:
        """Return the number of the current step, from 1; between steps, the number of the next."""
        return self.steps_done + 1

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Override the Trainer's method: train; then, even after an error, abort a batch that is being sampled ahead.

        Waits at most rollout.vllm_server.patience_seconds until the batch's thread has ended, because an engine in use
        must not be closed.
        """
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.ahead:
                self.engine.abort()
                wait([self.ahead], self.cfg.rollout.vllm_server.patience_seconds)

    def save_finished_steps(self) -> None:
        """Save a checkpoint of the finished steps if there is none yet. Every rank must call it, between two steps."""
        if self.ranks.broadcast(checkpoint.last_step(Path(self.args.output_dir))) < self.steps_done:
            self._save_checkpoint(self.model, None)
            self.ranks.barrier()  # for rank 0, which completes the checkpoint

    def run_dummy_pass(self, completions: int, prompt_tokens: int) -> None:
        """Run one forward and backward pass on dummy completions of full length, so that its memory can be measured.

        The trained weights have gradients during the pass, as in training from the second micro-batch of an update on.
        Afterwards the gradients are gone, and only this trainer's lists for metrics have changed.
        """
        model, device, keep = self.policy.model, self.policy.device, self.cfg.rollout.max_completion_tokens
        ids = torch.ones((completions, prompt_tokens + keep), dtype=torch.long, device=device)
        trained, was_training = [p for p in model.parameters() if p.requires_grad], model.training
        if self.args.gradient_checkpointing:  # as the Trainer does before its loop
            model.gradient_checkpointing_enable()
        self.scored_before = True  # no sampler's log-probs to compare with
        try:
            model.train()
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            with torch.random.fork_rng([device] if device.type == "cuda" else []), self._packed_attention():
                logps, entropies, _ = self._get_per_token_logps_and_entropies(
                    model, ids, torch.ones_like(ids), keep, compute_entropy=True
                )
                (logps if entropies is None else logps + entropies).sum().backward()
        finally:
            model.train(was_training)
            if self.args.gradient_checkpointing:
                model.gradient_checkpointing_disable()
            self.micro_batch = {}  # after an error its entropies would keep all activations
            for parameter in trained:
                parameter.grad = None

    # --- the Trainer and TRL call these hooks, in this order:
    #
    #     _load_from_checkpoint       once, in a resumed run
    #     get_train_dataloader        once
    #     training_step               for each micro-batch, with its forward and backward pass
    #       _generate_and_score_completions       in the first of a step: collects the step's batch
    #         _collected_rollout                  TRL's rollout function
    #         _get_per_token_logps_and_entropies  without gradients: of the policy if TRL corrects, of the KL reference
    #         _collected_reward                   TRL's reward function
    #       compute_loss              TRL's `_compute_loss` with our noise, weights and entropy bonus
    #         _get_per_token_logps_and_entropies  with gradients
    #     log                         after the last update of a step, which `StepCallback` has ended
    #     _save_checkpoint            if `StepCallback` decided to save
    #       create_model_card, save_model

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        """Override the Trainer's private hook: load the trained weights as `save_model` wrote them."""
        self.policy.load_trained(Path(resume_from_checkpoint))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Override the Trainer's hook: return one empty batch per micro-batch. The cursor draws the questions."""
        count = self.args.max_steps * self.args.gradient_accumulation_steps
        return DataLoader(range(count), collate_fn=lambda _: {})  # type: ignore[arg-type]

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Override the Trainer's hook: keep the contexts of `compute_loss` open until the backward pass ends."""
        with ExitStack() as self.until_backward:
            return super().training_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Override TRL's hook: collect a batch in place of TRL's placeholder `inputs`; return it as TRL's tensors.

        Masked completions (algorithm.mask_truncated) stay in the attention but out of the loss. Overrides a private
        method, because TRL has no public one between grading and loss.
        """
        self.batch = batch = self._collect_batch()
        self.measured |= completion_metrics(self.cfg, batch, self.ranks)
        self._last_loaded_step = self.state.global_step  # else TRL would now send weights to a vLLM of its own
        rows = [{"prompt": group.question.prompt} for group in batch.groups for _ in group.texts_G]
        with self._noise_in_trainer():
            tensors = super()._generate_and_score_completions(rows)
        tensors["advantages"] = torch.from_numpy(batch.advantage_P_G.ravel()).to(tensors["advantages"])
        if self.cfg.algorithm.mask_truncated:
            is_finished = [finished for group in batch.groups for finished in group.finished_G]
            finished = torch.tensor(is_finished, device=tensors["completion_mask"].device)
            tensors["tool_mask"] = tensors["completion_mask"] * finished[:, None]  # TRL: tokens that are in the loss
            tensors["num_items_in_batch"] = self.accelerator.gather(tensors["tool_mask"].sum()).sum()
        self._set_old_logprobs(tensors)
        return tensors

    def _collected_rollout(self, *_: object) -> dict[str, list[list[Any]]]:
        """Return prompt ids, completion ids and log-probs of the collected batch. TRL calls this to sample."""
        groups = self.batch.groups
        return {
            "prompt_ids": [group.prompt_ids for group in groups for _ in group.texts_G],
            "completion_ids": [completion.ids for group in groups for completion in group.completions_G],
            "logprobs": [completion.logprobs for group in groups for completion in group.completions_G],
        }

    def _collected_reward(self, **_: object) -> list[float]:
        """Return the reward of each completion. TRL calls this to grade, and only logs the result."""
        return [float(reward) for group in self.batch.groups for reward in group.reward_G]

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """Override TRL's hook: compute TRL's loss with the run's noise and attention, and correct its entropy bonus.

        TRL subtracts entropy_coef times the mean entropy over the tokens of each micro-batch. The correction puts the
        micro-batch's share of the mean over all tokens of the update in its place, as in the loss of DAPO. So the
        result does not depend on the split into micro-batches.
        """
        batch = self.micro_batch = dict(inputs)  # a copy, since the advantages are weighted in it
        in_loss = batch.get("tool_mask", batch["completion_mask"])
        self.loss_tokens.append(float(in_loss.sum()))
        # Enter only here, because TRL also samples inside a training step. Stay until the backward pass ends, because
        # autograd keeps a reference to the norm parameter, not a copy, and may recompute the attention.
        self.until_backward.enter_context(self._noise_in_trainer())
        self.until_backward.enter_context(self._packed_attention())
        target = self.cfg.algorithm.entropy_target  # an adaptive bonus is 0 above it
        coef = self.entropy_coef if target is None or self._last_world_entropy <= target else 0.0
        loss = super().compute_loss(model, batch, *args, **kwargs)  # may adapt `entropy_coef` for the next one
        if not coef:
            return loss
        # Weight of a token's entropy in the mean of TRL, and in the mean over the update.
        trl_weight = 1 / in_loss.sum().clamp(min=1)
        weight = self.ranks.size * self.args.steps_per_generation / batch["num_items_in_batch"].clamp(min=1)
        excess = (batch["entropies"] * in_loss).sum() * (trl_weight - weight)
        return loss + coef * (excess / self.current_gradient_accumulation_steps)

    def _get_per_token_logps_and_entropies(
        self, model: torch.nn.Module, ids: Tensor, attention_mask: Tensor, keep: int, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Override TRL's hook: return log-probs and entropies of the last `keep` tokens, and TRL's auxiliary loss.

        TRL calls this without gradients to compute the rollout's log-probs under the policy or the reference, and with
        gradients for the loss. With gradients it also multiplies the advantages in `micro_batch` by the importance
        weights, unless TRL has applied the weights already. This weights the loss of a token without its KL, as TRL
        does: a weight w is never negative, so min(r w A, clip(r) w A) = w min(r A, clip(r) A). The forward pass skips
        padding if the run packs.
        """
        call = partial(packing.forward_packed if self.packs else packing.forward_padded, model)
        if not torch.is_grad_enabled():
            # The policy without its adapter is the KL reference, which has no noise either.
            norms = self.policy.clean_norms if self.policy.adapter_is_off else None
            with self.policy.as_sampler(norms), self._packed_attention():
                return super()._get_per_token_logps_and_entropies(call, ids, attention_mask, keep, **kwargs)
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(
            call, ids, attention_mask, keep, **kwargs
        )
        is_completion = attention_mask[:, -keep:]
        self.micro_batch["entropies"] = entropies
        self.entropies.append(entropies.detach()[is_completion.bool()])
        if not self.scored_before:
            weights = self._record_mismatch(logps.detach(), self.micro_batch).value
            self.micro_batch["advantages"] = self.micro_batch["advantages"][:, None] * weights
        return logps, entropies, aux_loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Override the Trainer's hook after a step: pass its metrics to `on_step`, clear them, call `after_step`.

        First averages TRL's means of micro-batches, weighted by tokens where a metric is a mean over tokens. Raises
        Diverged if loss, gradient norm or a weight is not finite.
        """
        if "train_runtime" in logs:  # the Trainer's closing summary of the whole run
            return
        recorded = self._metrics["train"]
        tokens = [sum(of_ranks) for of_ranks in zip(*self.ranks.gather(self.loss_tokens), strict=True)]
        per_sequence = self.importance_sampling_level == "sequence"
        weights_by_unit = {"tokens": tokens, "ratios": [1.0] * len(tokens) if per_sequence else tokens}
        for metric in METRICS.values():
            if metric.over and metric.trl in recorded:
                weights = weights_by_unit[metric.over]
                total = sum(mean * weight for mean, weight in zip(recorded[metric.trl], weights, strict=True))
                recorded[metric.trl] = [total / max(sum(weights), 1.0)]
        super().log(logs, start_time)
        self.state.log_history.clear()  # metrics.jsonl has it; here it would grow, and so would each checkpoint
        metrics = self._step_metrics(logs)
        self.on_step(self.steps_done, metrics)
        self._check_finite(metrics)
        for of_step in (self.loss_tokens, self.entropies, self.mismatch_sums, self.measured, self.clock.seconds):
            of_step.clear()
        self.after_step(self.steps_done)

    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:
        """Override the Trainer's hook: write TRL's files and the run's state atomically. Every rank must call it."""
        checkpoints = self.args.output_dir

        def write_trainer_files(folder: Path | None) -> None:
            """Write TRL's files of all ranks into rank 0's `folder` itself. The other ranks pass None."""
            self.args.output_dir = self.ranks.broadcast(str(folder))
            try:
                super(LabTrainer, self)._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = checkpoints
            self.ranks.barrier()
            if folder is None:
                return
            for made in [*folder.glob("checkpoint-*")]:  # TRL's subfolder
                for file in [*made.iterdir()]:
                    file.rename(folder / file.name)
                made.rmdir()

        if not self.ranks.is_first:
            write_trainer_files(None)
            return
        state = {
            "step": self.steps_done, "prompts_seen": self.cursor.position, "noise": self.level.state,
            "micro_batch_size": self.cfg.optim.micro_batch_size, "config": self.settings,
        }  # fmt: skip
        checkpoint.save(Path(checkpoints), state, write_trainer_files, self.cfg.checkpoint.kept)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Override the Trainer's hook: write no model card, because the run directory is the record."""

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Override the Trainer's hook: write the trained weights to `output_dir`.

        Writes no tokenizer, which the Trainer would write too, because training does not change it.
        """
        if self.ranks.is_first:
            self.policy.save_trained(Path(str(output_dir)))

    # --- parts of the rollout

    def _collect_batch(self) -> Batch:
        """Sample a batch, or wait for the one sampled ahead; measure its noise; with overlap begin to sample the next.

        Before sampling, solves for sigma if the step needs a new one, and syncs the engine. If the engine fails, moves
        the cursor back to the start of the step, saves the finished steps, and raises EngineFailed.
        """
        cfg, step, engine, level = self.cfg, self.step, self.engine, self.level
        ahead, began_at = self.ahead, self.cursor.position
        self.ahead = None
        try:
            if ahead:
                with self.clock.phase("rollout", on_device=False):
                    batch, self.cursor = ahead.result()
            else:
                if level.needs_solving(step):
                    with self.clock.phase("probe"):
                        level.solve(step, build_kl_measure(cfg, step, self.cursor, self.policy, engine, self.ranks))
                    if self.ranks.is_first and (warning := level.warning_if_missed(step)):
                        terminal.say(f"warning, step {step}: {warning}")
                with self.clock.phase("sync"):
                    self.ranks.run_on_all(lambda: engine.sync(level.noise(step)), EngineFailed)
                batch = collect(cfg, step, self.cursor, self.policy, engine, self.clock, self.ranks)
            if cfg.overlaps:
                self.measured["rollout/staleness"] = float(ahead is not None)
            with self.clock.phase("probe"):
                self._measure_noise(batch.rollouts[0])  # every rank has one
            following = step + 1
            if may_be_sampled_ahead(cfg, following) and not level.needs_solving(following) and not self.stop.requested:
                with self.clock.phase("sync"):
                    engine.sync(level.noise(following))
                self.ahead = sample_ahead(cfg, following, self.cursor, self.policy, engine)
            return batch
        except EngineFailed:
            self.cursor.go_to(began_at)
            self.save_finished_steps()
            raise

    def _measure_noise(self, rollout: Rollout) -> None:
        """Store the step's noise metrics in `measured`. With aqn.probe_prompts also store the results of `probe`.

        Each rank probes its share of aqn.probe_prompts completions, so that their number does not depend on `gpus`.
        """
        self.measured |= self.level.metrics(self.step)
        norms, temperature = self.engine.norms(), self.cfg.rollout.temperature
        self.measured["noise/std_observed"] = aqn.observed_std(norms, self.policy.clean_norms, self.cfg.aqn.relative)
        if not (count := self.cfg.aqn.probe_prompts):
            return
        is_noisy = any(not torch.equal(norms[name].to(clean), clean) for name, clean in self.policy.clean_norms.items())
        self.level.kl = 0.0
        if self.ranks.any(is_noisy):  # all ranks or none, because `pool` waits for all
            of_rank = torch.zeros(0), torch.zeros(0)
            if share := len(self.ranks.share(count)):
                of_rank = probe(self.policy, norms, rollout, share, temperature)
            kl_T, gap_T = (torch.tensor(self.ranks.pool(values.tolist()), dtype=torch.float64) for values in of_rank)
            self.level.kl = kl_T.mean().item()
            if not self.measured.get("rollout/staleness"):  # an older adapter causes a gap too
                self.measured["sampler/kernel_gap_mean"] = gap_T.mean().item()
                self.measured["sampler/kernel_gap_max"] = gap_T.max().item()
        self.measured["noise/kl_nats"] = self.level.kl

    def _set_old_logprobs(self, tensors: dict[str, Any]) -> None:
        """Set `old_per_token_logps` in `tensors`: the log-probs pi_old of TRL's ratio pi / pi_old.

        With rollout.importance_correction=in_ratio these are the sampler's log-probs. Otherwise they are the trainer's,
        or left out with a single update per step, so that the ratio is 1. Also sets `scored_before`, and if TRL has
        computed the trainer's log-probs, records their mismatch with the sampler's.
        """
        scored = tensors.pop("old_per_token_logps", None)
        self.scored_before = scored is not None
        if scored is not None:
            self._record_mismatch(scored, tensors)  # TRL has applied the weights already
        if self.cfg.rollout.importance_correction == "in_ratio":
            tensors["old_per_token_logps"] = tensors["sampling_per_token_logps"]
        elif scored is not None and self.cfg.updates_per_step > 1:
            tensors["old_per_token_logps"] = scored

    # --- parts of the loss

    def _noise_in_trainer(self) -> AbstractContextManager[None]:
        """Return a context manager that gives the policy the rollout's noise if aqn.scope=rollout_and_train."""
        noise = self.level.noise(self.step)
        noisy = self.cfg.aqn.scope == "rollout_and_train" and noise.sigma > 0
        return self.policy.norms_as(noise.onto_norms(self.policy.clean_norms)) if noisy else nullcontext()

    def _packed_attention(self) -> AbstractContextManager[None]:
        """Return a context manager that lets the policy use packed attention if the run packs."""
        return packing.packed_attention(self.policy.base) if self.packs else nullcontext()

    def _record_mismatch(self, trainer_B_T: Tensor, batch: dict[str, Tensor]) -> correction.ImportanceWeights:
        """Record the mismatch of sampler and trainer for the step's metrics, and return the importance weights.

        `trainer_B_T` are the trainer's log-probs in nats of the completions in `batch`, TRL's tensors.
        """
        rollout, sampler_B_T, mask_B_T = self.cfg.rollout, batch["sampling_per_token_logps"], batch["completion_mask"]
        weights = correction.importance_weights(
            rollout.importance_correction, rollout.importance_clip_max, trainer_B_T, sampler_B_T, mask_B_T
        )
        self.mismatch_sums.append(correction.mismatch_sums(weights, trainer_B_T, sampler_B_T, mask_B_T))
        return weights

    # --- parts of the log

    def _step_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        """Return all metrics of a step, pooled over ranks. `logs` are TRL's metrics.

        Peak memory in GiB, on the host and on the GPU, is the largest of any rank.
        """
        means = {name: logs[metric.trl] for name, metric in METRICS.items() if metric.trl in logs}
        metrics = {name: math.nan if mean is None else mean for name, mean in means.items()}  # TRL's NaN is None
        entropies_T = torch.tensor(self.ranks.pool(torch.cat(self.entropies).tolist()), dtype=torch.float64)
        metrics["policy/entropy_nats"] = entropies_T.mean().item()
        metrics["policy/entropy_forking_nats"], metrics["policy/entropy_rest_nats"] = kl.split_by_entropy(entropies_T)
        metrics |= correction.mismatch_metrics(self.ranks.pool(torch.stack(self.mismatch_sums).tolist()))
        is_stale = self.measured.get("rollout/staleness", 0) > 0
        if self.measured.get("noise/kl_nats") == 0 and not is_stale:  # only the kernels cause a gap
            metrics["sampler/kernel_gap_mean"] = metrics["sampler/logprob_gap_mean"]
            metrics["sampler/kernel_gap_max"] = metrics["sampler/logprob_gap_max"]
        if self.cfg.algorithm.entropy_coef > 0 or self.cfg.algorithm.entropy_target is not None:
            metrics["policy/entropy_coef"] = self.entropy_coef
        seconds, clocked = self.clock.seconds, [phase for phase in PHASES if phase != "train"]
        if self.ranks.size > 1:
            clocked.append("wait")
        metrics |= {f"seconds/{phase}": seconds[phase] for phase in clocked}
        metrics["seconds/train"] = seconds["step"] - sum(seconds[phase] for phase in clocked)  # the rest of the step
        metrics["step/seconds"] = seconds["step"]
        sampled = sum(self.ranks.gather(sum(rollout.tokens for rollout in self.batch.rollouts)))
        metrics["step/tokens_per_second"] = sampled / seconds["step"]
        peak = {"memory/rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
        if torch.cuda.is_available():
            peak["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        of_ranks = self.ranks.gather(peak)
        return metrics | self.measured | {name: max(rank[name] for rank in of_ranks) for name in peak}

    def _check_finite(self, metrics: dict[str, float]) -> None:
        """Raise Diverged if loss, gradient norm or a weight is not finite, before a checkpoint stores it."""
        trained = [parameter for parameter in self.policy.model.parameters() if parameter.requires_grad]
        largest = torch.nn.utils.get_total_norm(trained, math.inf).item()
        values = {
            "loss": metrics["policy/loss"],
            "gradient norm": metrics["policy/grad_norm"],
            f"largest weight of the {'model' if self.cfg.trains_all else 'adapter'}": largest,
        }
        for name, value in values.items():
            if not math.isfinite(value):
                raise Diverged(
                    f"{name} is {'NaN' if math.isnan(value) else 'infinite'} at step {self.steps_done}. Type a lower "
                    f"optim.learning_rate (it is {self.cfg.optim.learning_rate:g}) or optim.max_grad_norm "
                    f"(it is {self.cfg.optim.max_grad_norm:g})."
                )
