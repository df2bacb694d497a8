"""The engine of transformers' `generate`: no second copy of the policy, any device.

It shares the trainer's modules. The only weights of its own are the noisy norms, which it swaps in while it generates.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from qerl_lab.aqn import Noise
from qerl_lab.policy import Policy
from qerl_lab.rollout import Rollout, Sampling

CHUNK = 1024  # tokens whose float32 logits are in memory at once


class TransformersEngine:
    """Engine over `policy.model`. `batch_size` is the most completions generated at once."""

    def __init__(self, policy: Policy, batch_size: int) -> None:
        self.policy, self.batch_size = policy, batch_size
        self.norms: dict[str, Tensor] = {}
        self.sync(policy, None)

    def sync(self, policy: Policy, noise: Noise | None) -> None:
        noise = noise or Noise(sigma=0.0, seed=0, step=0)
        self.norms = {
            name: noise.onto(clean, name, policy.norms[name].dtype) for name, clean in policy.clean_norms.items()
        }

    def noise_std(self) -> float:
        gaps = [self.norms[name].float() - clean for name, clean in self.policy.clean_norms.items()]
        return torch.cat(gaps).std().item()

    def close(self) -> None:
        self.norms = {}

    @contextmanager
    def _sampling_mode(self) -> Iterator[None]:
        """The model as the sampler: evaluation mode, no gradients, noisy norms."""
        model, training = self.policy.model, self.policy.model.training
        model.eval()
        try:
            with torch.no_grad(), self.policy.norms_as(self.norms):
                yield
        finally:
            model.train(training)

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        """Sample `group_size` completions of each prompt. Deterministic in (policy, prompts, sampling) on a CPU."""
        started = time.perf_counter()
        flat = [ids for ids in prompt_ids_P for _ in range(group_size)]
        devices = [self.policy.device] if self.policy.device.type == "cuda" else []
        with self._sampling_mode(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(sampling.seed)
            parts = [
                self._batch(flat[at : at + self.batch_size], sampling) for at in range(0, len(flat), self.batch_size)
            ]
        rows = [row for part in parts for row in part]
        grouped = [rows[at : at + group_size] for at in range(0, len(rows), group_size)]
        tokens = sum(len(ids) for ids, _, _, _ in rows)
        return Rollout(
            prompt_ids_P=prompt_ids_P,
            completion_ids_P_G=[[ids for ids, _, _, _ in group] for group in grouped],
            logprobs_P_G=[[logprobs for _, logprobs, _, _ in group] for group in grouped],
            finish_reasons_P_G=[[reason for _, _, reason, _ in group] for group in grouped],
            entropy=sum(entropy for _, _, _, entropy in rows) / tokens,
            seconds=time.perf_counter() - started,
        )

    def _batch(self, prompts: list[list[int]], sampling: Sampling) -> list[tuple[list[int], list[float], str, float]]:
        """(completion ids, log-probs, finish reason, summed entropy) of each prompt in one call of `generate`."""
        ids, mask = left_padded(prompts, self.policy.tokenizer.pad_token_id, self.policy.device)
        recorder, ends = Recorder(sampling.temperature), self.policy.end_ids()
        out = self.policy.model.generate(
            input_ids=ids,
            attention_mask=mask,
            logits_processor=LogitsProcessorList([recorder]),
            generation_config=GenerationConfig(
                do_sample=True, max_new_tokens=sampling.max_tokens, temperature=sampling.temperature,
                top_p=sampling.top_p, top_k=0, eos_token_id=ends, pad_token_id=self.policy.tokenizer.pad_token_id,
            ),
        )[:, ids.shape[1] :]  # fmt: skip
        logprobs, entropies = recorder.finish(out)
        is_end = torch.isin(out, torch.tensor(ends, device=out.device))
        lengths = ((is_end.cumsum(1) - is_end.long()) == 0).sum(1).tolist()  # up to and with the first end token
        summed = [row[:n].sum().item() for row, n in zip(entropies, lengths, strict=True)]
        return [
            (row[:n], scores[:n], "stop" if row[n - 1] in ends else "length", entropy)
            for row, scores, n, entropy in zip(out.tolist(), logprobs.tolist(), lengths, summed, strict=True)
        ]

    def noise_kl(self, rollout: Rollout, completions: int, temperature: float) -> float:
        pairs = [
            (p, c) for p, group in zip(rollout.prompt_ids_P, rollout.completion_ids_P_G, strict=True) for c in group
        ]
        pairs = pairs[:: max(1, len(pairs) // completions)][:completions]  # spread over the prompts
        noisy, own = self._states(pairs), self.norms
        self.norms = {name: w.to(own[name].dtype) for name, w in self.policy.clean_norms.items()}
        clean, self.norms = self._states(pairs), own
        total = 0.0
        for states in zip(noisy.split(CHUNK), clean.split(CHUNK), strict=True):
            p, q = (self._logprobs(part, temperature) for part in states)
            total += (p.exp() * (p - q)).sum().item()
        return total / len(noisy)

    def logprobs(self, pairs: list[tuple[list[int], list[int]]], temperature: float) -> Tensor:
        """The sampler's log-probs [tokens, vocabulary] at every completion token of (prompt, completion) pairs."""
        return self._logprobs(self._states(pairs), temperature)

    def _states(self, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
        """What the head reads at every completion token, [tokens, hidden]: `CHUNK` of them make logits that fit."""
        ids, mask = left_padded([p + c for p, c in pairs], self.policy.tokenizer.pad_token_id, self.policy.device)
        keep = max(len(c) for _, c in pairs) + 1
        with self._sampling_mode():
            backbone = self.policy.model.get_base_model().base_model
            states = backbone(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -keep:-1]
        at = torch.arange(keep - 1, device=ids.device)
        is_completion = at >= keep - 1 - torch.tensor([[len(c)] for _, c in pairs], device=ids.device)
        return states[is_completion]

    def _logprobs(self, states: Tensor, temperature: float) -> Tensor:
        """From what `_states` gave. The model's own forward makes the logits, because some scale them after the head
        (Granite) or cap them (Gemma 2): it runs on one token, and a hook puts `states` where its backbone's output was.
        """
        model = self.policy.model.get_base_model()

        def put_states(_module: nn.Module, _args: Any, output: Any) -> Any:
            output.last_hidden_state = states.unsqueeze(1)
            return output

        token = torch.zeros(1, 1, dtype=torch.long, device=states.device)
        with self._sampling_mode(), model.base_model.register_forward_hook(put_states):
            logits = model(input_ids=token, use_cache=False).logits.squeeze(1)
            return (logits.float() / temperature).log_softmax(-1)


class Recorder(LogitsProcessor):
    """Sees every step's logits: keeps the entropy, and the log-prob of whichever token was then sampled.

    Holds one step's [batch, vocabulary] at a time, where `output_logits=True` would keep them all.
    """

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.logprobs: list[Tensor] = []
        self.entropies: list[Tensor] = []
        self._scores: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids[:, -1])
        self._scores = (scores.float() / self.temperature).log_softmax(-1)
        self.entropies.append(-(self._scores.exp() * self._scores).sum(-1))
        return scores

    def _take(self, sampled: Tensor) -> None:
        if self._scores is not None:
            self.logprobs.append(self._scores.gather(-1, sampled[:, None])[:, 0])

    def finish(self, completions: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs, entropies), each [batch, tokens] like `completions`."""
        self._take(completions[:, -1])
        return torch.stack(self.logprobs, 1), torch.stack(self.entropies, 1)


def left_padded(rows: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask [N, longest], padded on the left."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
    return ids, mask
