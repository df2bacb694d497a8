"""Plant known bugs one by one in a copy of src, run the tests named for each, and say which were found.

    python tests/planted.py            # all
    python tests/planted.py sigma pass # those that have one of these words in their names

Each bug replaces text that occurs once in one file of src/qerl_lab. The exit code is 1 if a bug survived, or if its
text is no longer there: then the list below has to follow the code.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
KILLED, SURVIVED = 1, 0  # exit codes of pytest


class Bug(NamedTuple):
    """`right`, in `file` of src/qerl_lab, becomes `wrong`; `tests` (of tests/, a file or a test each) find it."""

    name: str
    file: str
    right: str
    wrong: str
    tests: str


BUGS = [
    # objective
    Bug("advantage has the other sign", "algorithms/groups.py",
        "centred = reward_P_G - reward_P_G.mean(axis=1, keepdims=True)",
        "centred = reward_P_G.mean(axis=1, keepdims=True) - reward_P_G",
        "golden/test_groups.py"),
    Bug("overlong punishment starts a token late", "algorithms/groups.py",
        "allowed = max_tokens - buffer_tokens", "allowed = max_tokens - buffer_tokens + 1",
        "golden/test_groups.py"),
    Bug("upper clip bound is the lower one", "algorithms/__init__.py",
        "else cfg.epsilon_high,", "else cfg.epsilon_low,",
        "golden/test_objective.py"),
    Bug("k3 estimators are swapped", "algorithms/__init__.py",
        'cfg.kl_estimator == "k3_ratio"', 'cfg.kl_estimator == "k3"',
        "golden/test_objective.py"),
    Bug("importance correction has no clip", "algorithms/correction.py",
        "is_cut = ratio > clip_max", "is_cut = ratio > 2 * clip_max",
        "golden/test_correction.py"),
    Bug("importance correction is not applied", "train/trainer.py",
        'self.micro_batch["advantages"][:, None] * weights',
        'self.micro_batch["advantages"][:, None] * weights.clamp(1, 1)',
        "golden/test_loss.py"),
    Bug("several updates take the new policy for the old", "train/trainer.py",
        "elif scored is not None and self.cfg.updates_per_step > 1:",
        "elif scored is not None and self.cfg.updates_per_step > 4:",
        "golden/test_loss.py"),
    Bug("rest of the entropy bonus has the other sign", "train/trainer.py",
        "return loss + coef * (excess", "return loss - coef * (excess",
        "golden/test_loss.py"),
    Bug("loss is taken at temperature 1", "train/grpo_config.py",
        "temperature=cfg.rollout.temperature,", "temperature=1.0,",
        "golden/test_loss.py"),
    # optimizer
    Bug("warm-up counts steps for updates", "train/grpo_config.py",
        "cfg.optim.warmup_ratio * cfg.steps * cfg.updates_per_step", "cfg.optim.warmup_ratio * cfg.steps",
        "unit/train/test_trainer.py::test_rates_betas_decay_and_clipping_are_those_asked_for"),
    Bug("beta2 is the library's", "train/grpo_config.py",
        "        adam_beta2=cfg.optim.beta2,\n", "",
        "unit/train/test_trainer.py::test_rates_betas_decay_and_clipping_are_those_asked_for"),
    Bug("weight decay is the library's", "train/grpo_config.py",
        "        weight_decay=cfg.optim.weight_decay,\n", "",
        "unit/train/test_trainer.py::test_rates_betas_decay_and_clipping_are_those_asked_for"),
    Bug("clipping is the library's", "train/grpo_config.py",
        "        max_grad_norm=cfg.optim.max_grad_norm,\n", "",
        "unit/train/test_trainer.py::test_rates_betas_decay_and_clipping_are_those_asked_for"),
    Bug("an extended run begins with the rate of the shorter one", "train/step_callback.py",
        "[steps * self.cfg.updates_per_step for steps in self.cfg.extended]", "self.cfg.extended",
        "unit/train/test_extension.py"),
    # noise
    Bug("sigma exponent is off by one", "aqn/schedule.py",
        "return decay(cfg, now - 1, last - 1 if", "return decay(cfg, now, last - 1 if",
        "golden/test_sigma.py"),
    Bug("noise accumulates", "rollout/transformers.py",
        "noise.onto_norms(self.policy.clean_norms",
        'noise.onto_norms({name: weight.float() for name, weight in (getattr(self, "_norms", None) or '
        "self.policy.clean_norms).items()}",
        "unit/train/test_trainer.py::test_the_engine_holds_the_noise_of_the_seed_and_step"),
    Bug("reference has the noise", "train/trainer.py",
        "= self.policy.clean_norms if self.policy.adapter_is_off else None",
        "= self.policy.clean_norms if not self.policy.norms else None",
        "golden/test_loss.py"),
    Bug("noise stays in the evaluation", "train/run.py",
        "session.engine.sync(aqn.CLEAN)", "session.engine.sync(aqn.Noise(0.1, 0, 1))",
        "unit/train/test_evaluation_of_ranks.py"),
    Bug("noise is probed at temperature 1", "train/trainer.py",
        "norms, temperature = self.engine.norms(), self.cfg.rollout.temperature",
        "norms, temperature = self.engine.norms(), 1.0",
        "unit/train/test_trainer.py::test_without_noise_nothing_is_probed"),
    Bug("sigma is solved at temperature 1", "train/noise_level.py",
        "kl.logprobs(policy.base, states, cfg.rollout.temperature)",
        "kl.logprobs(policy.base, states, 1.0)",
        "unit/train/test_noise_level.py"),
    Bug("too little noise in the engine gives no warning", "train/health.py",
        "abs(std / sigma - 1) > SIGMA_TOLERANCE", "std / sigma - 1 > SIGMA_TOLERANCE",
        "unit/train/test_health.py"),
    # sampling and data
    Bug("sampler entropy counts padding", "rollout/transformers.py",
        "summed = [row[:n].sum().item() for", "summed = [row.sum().item() for",
        "unit/rollout/test_contract.py"),
    Bug("sampler draws at temperature 1", "rollout/transformers.py",
        '{"temperature": sampling.temperature,', '{"temperature": 1.0,', "unit/rollout/test_contract.py"),
    Bug("sampler forgets the nucleus", "rollout/transformers.py",
        '"top_p": sampling.top_p,', '"top_p": 1.0,', "unit/rollout/test_contract.py"),
    Bug("sampler draws the fifty most probable tokens only", "rollout/transformers.py",
        '"top_k": 0}', '"top_k": 50}', "unit/rollout/test_contract.py"),
    Bug("sampler reads the padding of a prompt", "rollout/transformers.py",
        "attention_mask=mask,", "attention_mask=torch.ones_like(mask),", "unit/rollout/test_contract.py"),
    Bug("an end token at the limit counts as cut", "rollout/transformers.py",
        '"stop" if row[n - 1] in ends else "length"', '"stop" if n < sampling.max_tokens else "length"',
        "unit/rollout/test_contract.py"),
    Bug("policy entropy counts padding", "train/trainer.py",
        "entropies.detach()[is_completion.bool()]", "entropies.detach()[is_completion >= 0]",
        "golden/test_loss.py"),
    Bug("forking tokens are the fifth with the lowest entropy", "evaluate/kl.py",
        "sort(descending=True)", "sort()", "golden/test_loss.py unit/evaluate/test_entropy.py"),
    Bug("only the tokenizer's end token ends a completion", "model/policy.py",
        "configured = self.model.generation_config.eos_token_id", "configured = []  #",
        "unit/rollout/test_transformers.py::test_a_models_own_sampling_defaults_do_not_reach_the_sampler"),
    Bug("a packed text has the positions of its row", "train/packing.py",
        "position_ids=(is_token.cumsum(1) - 1)[is_token][None],",
        "position_ids=torch.arange(int(is_token.sum()))[None],",
        "unit/train/test_packing.py"),
    Bug("a packed text has positions zero", "train/packing.py",
        "position_ids=(is_token.cumsum(1) - 1)[is_token][None],",
        "position_ids=torch.zeros_like(is_token.long())[is_token][None],",
        "unit/train/test_packing.py"),
    Bug("a resumed run asks its questions from the start", "train/run.py",
        "Cursor(session.data, saved.prompts_seen if saved else 0)", "Cursor(session.data, 0)",
        "unit/train/test_noise_level.py"),
    Bug("a checkpoint forgets the refills", "train/trainer.py",
        '"prompts_seen": self.cursor.position',
        '"prompts_seen": self.steps_done * self.cfg.rollout.prompts_per_step',
        "unit/train/test_engine_failure.py"),
    Bug("a step's speed leaves out the refills", "train/trainer.py",
        "sum(rollout.tokens for rollout in self.batch.rollouts)",
        "sum(rollout.tokens for rollout in self.batch.rollouts[:1])",
        "unit/train/test_trainer.py::test_every_step_is_reported_once_with_declared_metrics"),
    Bug("peak memory is that of rank 0", "train/trainer.py",
        "{name: max(rank[name] for rank in of_ranks) for name in peak}",
        "{name: of_ranks[0][name] for name in peak}",
        "unit/train/test_trainer.py::test_peak_memory_is_that_of_the_rank_with_most"),
    Bug("completions of a group have the log-probs of others", "rollout/vllm/vllm_engine.py",
        "LOGPROBS.pop(request_ids_G[output.index], [])", "LOGPROBS.pop(request_ids_G[-1 - output.index], [])",
        "unit/rollout/test_vllm_stop.py"),
    Bug("vLLM keeps results of the old weights", "rollout/vllm/vllm_engine.py",
        "if not self.llm.reset_prefix_cache():", "if False:",
        "unit/rollout/test_all_weights_sync.py"),
    Bug("minutes of a server's rollout are seconds", "rollout/vllm_server/server_engine.py",
        "deadline = time.monotonic() + 60 * minutes", "deadline = time.monotonic() + minutes",
        "unit/rollout/test_vllm_server.py::test_the_time_limit_holds_for_all_tries_of_a_request"),
    # sessions and machines
    Bug("a run killed while it is extended is done with steps that it lacks", "record/directory.py",
        '(self.path / DONE).rename(self.path / f"{DONE}-{cfg.extended[-1]}")\n        self._replace_config(cfg)',
        'self._replace_config(cfg)\n        (self.path / DONE).rename(self.path / f"{DONE}-{cfg.extended[-1]}")',
        "unit/record/test_directory.py"),
    Bug("a finished run has no checkpoint to be extended from", "train/run.py",
        "if cfg.checkpoint.keep == 0:", "if cfg.checkpoint.keep <= 1:",
        "unit/train/test_extension.py"),
    Bug("a queue counts its lease from each run's start", "tools/queue.py",
        "< self.began + 60 * minutes", "< now + 60 * minutes",
        "unit/tools/test_queue_machine.py::test_the_lease_is_counted_from_the_start_of_the_command"),
    # sampling ahead
    Bug("a step sampled ahead has the noise of the step before", "train/trainer.py",
        "engine.sync(level.noise(following))", "engine.sync(level.noise(step))",
        "unit/train/test_overlap.py"),
    Bug("a checkpoint skips the questions that are sampled ahead", "train/ahead.py",
        "moved, thread = Cursor(cursor.data, cursor.position),", "moved, thread = cursor,",
        "unit/train/test_overlap.py"),
    Bug("the step after a checkpoint is sampled ahead", "train/ahead.py",
        "(cfg.checkpoint.every, cfg.eval.every)", "(cfg.eval.every,)",
        "unit/train/test_overlap.py"),
    # formats and adapters
    Bug("scale of a zero block is zero", "formats/nvfp4.py",
        "_SCALE_OF_ZERO_BLOCK = 0.125", "_SCALE_OF_ZERO_BLOCK = 0.0",
        "golden/test_formats_edges.py golden/test_formats_reference.py"),
    Bug("noise is added to the norms from before the training", "model/policy.py",
        "return Policy(base, tokenizer, norms, {name: norm.detach() for name, norm in norms.items()}, dtype)",
        "return Policy(base, tokenizer, norms, {name: norm.detach().clone() for name, norm in norms.items()}, dtype)",
        "unit/model/test_all_weights.py"),
    Bug("master weights are rounded to the compute dtype", "model/all_weights.py",
        "model.float().requires_grad_(True)", "model.requires_grad_(True)",
        "unit/model/test_all_weights.py"),
    Bug("embeddings and norms of master weights are not rounded", "model/all_weights.py",
        "if dtype != torch.float32 and", "if dtype == torch.float64 and",
        "unit/model/test_all_weights.py"),
    Bug("adapter is not scaled in vLLM", "rollout/vllm/adapter.py",
        "self.buffers.write((self.lora.alpha or self.lora.rank) / self.lora.rank)", "self.buffers.write(1.0)",
        "unit/rollout/test_adapter_product.py"),
    Bug("adapter is not scaled backward", "model/lora.py",
        "grad_B = scaled_linear(grad_y.t(), inner.t(), ctx.scaling)",
        "grad_B = scaled_linear(grad_y.t(), inner.t(), 1.0)",
        "unit/model/test_lora.py"),
    Bug("a dense layer outlives its packing", "formats/format.py",
        "quantized_by_rows(quantize, weights.pop(name), rows, name=name)",
        "quantized_by_rows(quantize, weights[name], rows, name=name)",
        "unit/model/test_loading.py"),
    Bug("adapters of all seeds begin alike", "model/policy.py",
        "torch.manual_seed(cfg.seed)", "torch.manual_seed(0)",
        "unit/model/test_lora.py::test_a_new_adapter_is_drawn_from_the_seed_of_the_run_alone"),
    Bug("an exported adapter lacks the revision of its base", "tools/export.py",
        "            settings.revision = cfg.model.revision\n", "",
        "unit/tools/test_export.py::test_an_adapter_on_a_model_of_the_hub_names_the_model_and_its_revision"),
    # evaluation
    Bug("pass@k draws one sample less", "report/stats.py",
        "samples - c + 1)", "samples - c)",
        "golden/test_passes.py"),
    Bug("evaluation has the temperature of training", "evaluate/accuracy.py",
        "cfg.eval.temperature, cfg.eval.top_p", "cfg.rollout.temperature, cfg.eval.top_p",
        "unit/evaluate/test_accuracy.py"),
    Bug("answers to some questions are printed for all", "evaluate/accuracy_run.py",
        '"questions": options.questions, "seed"', '"seed"',
        "unit/evaluate/test_accuracy_run.py::test_an_evaluation_is_another_one_in_every_setting_that_changes_an_answer"),
    Bug("every draw of noise is the same", "evaluate/sigma.py",
        "for step in range(1, DRAWS + 1)]", "for step in [1] * DRAWS]",
        "unit/evaluate/test_sigma_command.py::test_formats_and_sigmas_are_measured_on_the_same_completions"),
    Bug("every draw of noise in a notebook is the same", "evaluate/format_effects.py",
        "Noise(sigma, seed=0, step=draw)", "Noise(sigma, seed=0, step=1)",
        "unit/evaluate/test_format_effects.py"),
    Bug("the untrained model is sampled as often as the trained one", "train/run.py",
        "cfg.eval.samples_before or cfg.eval.samples", "cfg.eval.samples",
        "unit/train/test_subset.py"),
    Bug("the root of a negative number is positive", "tasks/answers/value.py",
        "return -root if negative else root", "return root",
        "unit/tasks/answers/test_judge.py::test_every_case_of_the_table_is_decided_as_it_says"),
    # report
    Bug("one preregistered run makes a contrast preregistered", "report/verdicts.py",
        "is_registered = holding == len(runs)", "is_registered = holding > 0",
        "unit/report/test_verdicts.py::"
        "test_one_run_that_was_made_for_other_claims_is_enough_for_a_verdict_to_be_not_preregistered"),
    Bug("the step before training counts", "report/measures.py",
        'run.steps.loc[1:, "reward/answer"]', 'run.steps.loc[:, "reward/answer"]',
        "unit/report/test_verdicts.py::test_measures_of_a_curve"),
    Bug("a run's speed is the mean over its steps", "report/runs.py",
        '"tokens_per_second": float(tokens.sum() / spent),',
        '"tokens_per_second": float(steps["step/tokens_per_second"].mean()),',
        "unit/report/test_report.py"),
    Bug("variances are raised to the mean of their family", "report/verdicts.py",
        "float(np.median(family[", "float(np.mean(family[",
        "unit/report/test_verdicts.py::test_seeds_that_agree_by_luck_decide_nothing"),
    Bug("a share of right answers is their reward", "report/measures.py",
        '.astype("float64") / weight', '.astype("float64")',
        "unit/report/test_verdicts.py::test_measures_of_a_curve"),
    Bug("a difference outside of the margin is tested on one side", "report/verdicts.py",
        "min(1.0, 2 * outside)", "min(1.0, outside)",
        "unit/report/test_verdicts.py::test_a_difference_outside_of_the_margin_is_tested_on_both_sides"),
    Bug("a claim frees every key that begins like a free one", "report/claims.py",
        'key.startswith(f"{name}.")', "key.startswith(name)",
        "unit/report/test_verdicts.py::test_arms_that_also_differ_in_another_setting_are_not_compared"),
]  # fmt: skip


def try_one(bug: Bug, scratch: Path) -> str:
    """Plant `bug` in the copy `scratch`, run its tests, and mend the copy. Return killed, survived or what hindered."""
    path = scratch / "src" / "qerl_lab" / bug.file
    text = path.read_text("utf-8") if path.exists() else ""
    if text.count(bug.right) != 1:
        return f"not planted: {bug.file} has its text {text.count(bug.right)} times"
    path.write_text(text.replace(bug.right, bug.wrong), "utf-8")
    environment = os.environ | {"PYTHONPATH": str(scratch / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    files = [f"tests/{name}" for name in bug.tests.split()]
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files],
            cwd=scratch, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        path.write_text(text, "utf-8")
    if ended.returncode == KILLED:
        return "killed"
    return "survived" if ended.returncode == SURVIVED else f"the tests did not run:\n{ended.stdout}{ended.stderr}"


def main(words: list[str]) -> int:
    chosen = [bug for bug in BUGS if not words or any(word in bug.name for word in words)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name in ("src", "tests", "conf", "sweeps", "results", "docs"):
            shutil.copytree(ROOT / name, scratch / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "LOG.md"):
            shutil.copy(ROOT / name, scratch)
        for bug in chosen:
            began = time.monotonic()
            results.append(try_one(bug, scratch))
            print(f"{results[-1]}  {bug.name} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{results.count('killed')} of {len(results)} killed")
    return int(results.count("killed") < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
