"""Rollout engine on transformers' `generate`: runs on any device, without a second copy of the policy.

The engine shares the trainer's modules. Only the noisy norms are copies; they replace the clean norms during
generation.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, Engine, OnDone, Rollout, Sampling, do_nothing


class TransformersEngine(Engine):
    """Engine over `policy.model`, generating at most `batch_size` completions at once."""

    def __init__(self, policy: Policy, batch_size: int) -> None:
        self.policy, self.batch_size = policy, batch_size
        self.sync(CLEAN)

    def sync(self, noise: Noise) -> None:
        """Add `noise` to copies of the clean norms. Trained weights need no copy: the engine uses the policy's."""
        self._norms = noise.onto_norms(self.policy.clean_norms)

    def norms(self) -> dict[str, Tensor]:
        """Return the noisy norm weights by full layer name."""
        return self._norms

    def close(self) -> None:
        """Drop the noisy norms, the only tensors that the engine does not share with the trainer."""
        self._norms = {}

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample `group_size` completions of each prompt. On a CPU equal policy and arguments give equal results."""
        started = time.perf_counter()
        flat = [ids for ids in prompt_ids_P for _ in range(group_size)]
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        with self.policy.as_sampler(self._norms), torch.random.fork_rng(devices=devices), self._polling(on_done):
            torch.manual_seed(sampling.seed + sampling.first)  # `first`: engines that share prompts draw apart
            completions = list[Completion]()
            for at in range(0, len(flat), self.batch_size):
                batch = self._generate_batch(flat[at : at + self.batch_size], sampling)
                completions += batch
                on_done(len(batch))
        grouped = [completions[at : at + group_size] for at in range(0, len(completions), group_size)]
        return Rollout(prompt_ids_P, grouped, time.perf_counter() - started)

    @contextmanager
    def _polling(self, on_done: OnDone) -> Iterator[None]:
        """Context manager: call `on_done` with 0 before each norm of the model, so that it can end the sampling.

        A call per token would be too seldom: on a CPU the first token, after all prompts of a batch, can take minutes.
        """
        base = self.policy.base
        names = [name for name, p in base.named_parameters() if name.endswith(".weight") and p.dim() == 1]
        norms = [base.get_submodule(name.removesuffix(".weight")) for name in names]
        hooks = [norm.register_forward_pre_hook(lambda *_: on_done(0)) for norm in norms]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _generate_batch(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """Generate one completion of each prompt."""
        longest = max(map(len, prompts))
        pad_id, device = self.policy.tokenizer.pad_token_id, self.policy.device
        ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=device)
        ends = self.policy.end_ids()
        is_drawn = sampling.temperature > 0  # else greedy
        recorder = Recorder(sampling.temperature if is_drawn else 1.0)
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if is_drawn else {}
        out = self.policy.model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([recorder]),
            generation_config=GenerationConfig(
                do_sample=is_drawn, max_new_tokens=sampling.max_tokens, eos_token_id=ends, pad_token_id=pad_id, **drawn
            ),
        )[:, longest:]
        logprobs, entropies = recorder.finish(out)
        is_end = torch.isin(out, torch.tensor(ends, device=out.device))
        lengths = ((is_end.cumsum(1) - is_end.long()) == 0).sum(1).tolist()  # including the first end token
        summed = [row[:n].sum().item() for row, n in zip(entropies, lengths, strict=True)]
        return [
            Completion(row[:n], scores[:n], "stop" if row[n - 1] in ends else "length", entropy)
            for row, scores, n, entropy in zip(out.tolist(), logprobs.tolist(), lengths, summed, strict=True)
        ]


class Recorder(LogitsProcessor):
    """Records the entropy of each step's logits and the log-prob of the token sampled from them.

    Holds the [batch, vocabulary] scores of one step at a time, while transformers' `output_logits=True` would hold the
    scores of all steps.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self._scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Record this step's entropy, and the log-prob of the token sampled in the previous step; return the scores."""
        self._record_logprobs(input_ids[:, -1])
        self._scores = (scores.float() / self.temperature).log_softmax(-1)
        self.entropies.append(-(self._scores.exp() * self._scores).sum(-1))
        # A NaN makes a whole row NaN, and sampling from it would kill a GPU process. The NaN entropy tells the caller.
        return scores.masked_fill_(self._scores[:, :1].isnan(), 0.0)

    def _record_logprobs(self, sampled: Tensor) -> None:
        """Append to `logprobs` the log-probs of the token ids `sampled` [batch], which the previous step sampled.

        They are read from the scores of that step. Does nothing before the first step.
        """
        if self._scores is not None:
            self.logprobs.append(self._scores.gather(-1, sampled[:, None])[:, 0])

    def finish(self, completions: Tensor) -> tuple[Tensor, Tensor]:
        """Record the last token of `completions` [batch, tokens]; return log-probs and entropies in the same shape."""
        self._record_logprobs(completions[:, -1])
        return torch.stack(self.logprobs, 1), torch.stack(self.entropies, 1)
