"""Rollout engine on a `vllm serve` on other GPUs or hosts; completions, adapter and norms go over its endpoints.

Uses vLLM's HTTP interface and `vllm.worker.NormWorker`, the server's worker class. The adapter's files lie in a folder
that trainer and server see. `serve_line` prints the command that starts the server.
"""

import secrets
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qerl_lab import formats
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.formats.fp8 import W8A8
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, Engine, EngineFailed, OnDone, Rollout, Sampling, do_nothing
from qerl_lab.rollout.vllm.base import scratch_folder
from qerl_lab.rollout.vllm.transfer import (
    adapter_bytes,
    check_adapter,
    check_norms,
    decode_tensor,
    sampling_arguments,
    write_adapter_config,
    write_adapter_weights,
)
from qerl_lab.rollout.vllm_server.client import ADVICE, Refused, ServerClient, Unanswered
from qerl_lab.rollout.vllm_server.server_command import required_settings

AT_LEAST = ("max_model_len", "max_lora_rank")  # a server may have more of these
PROBE = "A train has 12 cars with 30 seats each. How many seats are there?"
PROBE_TOKENS = 16
# Largest mean difference of log-probs in nats. A different order of summation stays below half of it
# (tests/gpu/test_vllm_engine.py measures up to 0.043 for bfloat16). Other weights exceed it, unless they differ as
# little as two rounding rules of a format.
NEAR = {torch.float32: 0.01, torch.bfloat16: 0.1}
LOOK_SECONDS = 1.0  # at most, between two calls of `on_done`
ABORT_SECONDS = 0.5  # until requests are aborted again: one may have reached the server after the last time
NO_NAN = "not JSON compliant"  # Python's json error for a NaN, passed on by the server


class VllmServerEngine(Engine):
    """Engine on the server at rollout.vllm_server.url, which serves the policy's base to one run at a time.

    Seeds determine the draws as in `VllmEngine`. Raises ConfigError if there is no server, if it fails already at the
    start, or if its model or settings differ from the run's.
    """

    def __init__(self, policy: Policy, cfg: RunConfig) -> None:
        self.policy, self.cfg, server_cfg = policy, cfg, cfg.rollout.vllm_server
        self._open = ExitStack()
        self._requests = list[Future[list[Completion]]]()  # of the last `generate`
        self._aborted = False
        self._server = ServerClient(server_cfg.url, server_cfg.patience_seconds, cfg.rollout.batch_size)
        self._open.callback(self._server.close)
        self._name = f"policy-{secrets.token_hex(4)}"  # name of the adapter on the server, unique to this engine
        try:
            self._folder = self._make_folder()
            write_adapter_config(policy.model, self._folder)
            # A server that differs would train the policy on another model's completions, unnoticed.
            self._check_settings()
            self._take_over()
            self.sync(CLEAN)
            check_norms(self.norms(), policy.clean_norms, self._server.name, ADVICE)
            held = {name for layers in self._call_workers("qerl_adapted") for name in layers}
            check_adapter(held, policy.model, self._server.name, ADVICE)
            self._check_logprobs()
        except EngineFailed as error:
            self.close()
            # These two errors can mean that the server was started with other settings.
            advice = f". {ADVICE}" if isinstance(error, Refused | Unanswered) else ""
            raise ConfigError(f"{error}{advice}") from error
        except BaseException:
            self.close()
            raise

    def _make_folder(self) -> Path:
        """Make a folder for the adapter's files, which `close` removes.

        It lies in rollout.vllm_server.adapter_dir, or if that is null in RAM or the system's temporary folder.
        """
        adapter_dir = self.cfg.rollout.vllm_server.adapter_dir
        if adapter_dir is None:
            return self._open.enter_context(scratch_folder(adapter_bytes(self.policy.model)))
        shared = Path(adapter_dir).absolute()
        shared.mkdir(parents=True, exist_ok=True)
        folder = Path(self._open.enter_context(tempfile.TemporaryDirectory(prefix="qerl-lab-", dir=shared)))
        # Only its owner may read a temporary directory, and the server may run as another user.
        folder.chmod(shared.stat().st_mode & 0o755)
        return folder

    def _check_settings(self) -> None:
        """Raise ConfigError unless the server has the settings that `serve_line` prints, or more of AT_LEAST."""
        served = self._call_workers("qerl_describe")[0]  # all workers have one configuration
        served["format"] = format_of(served.pop("quantization"), served.pop("quantization_config"))
        wanted = required_settings(self.cfg, self.policy.model.dtype) | {"format": self.cfg.format.name}
        for key, value in served.items():
            fits, allowed = value == wanted[key], str(wanted[key])
            if key in AT_LEAST:
                fits, allowed = value >= wanted[key], f"at least {allowed}"
            if not fits:
                raise ConfigError(f"{self._server.name} has {key}={value}; allowed for this run: {allowed}. {ADVICE}")

    def _check_logprobs(self) -> None:
        """Raise ConfigError if the server's weights differ from the policy's, judged by one sampled text.

        They differ if the mean distance between the log-probs of server and policy is at least `NEAR` nats per token.
        """
        policy, model, rollout = self.policy, self.cfg.model, self.cfg.rollout
        prompt = policy.tokenizer(PROBE)["input_ids"][: rollout.max_prompt_tokens]
        out = self.generate([prompt], 1, Sampling(min(PROBE_TOKENS, rollout.max_completion_tokens), seed=0))
        ids, server_logprobs, *_ = out.completions[0]
        with policy.as_sampler():
            logits = policy.model(input_ids=torch.tensor([prompt + ids], device=policy.device)).logits[0]
        policy_logprobs = logits[len(prompt) - 1 : -1].float().log_softmax(-1)[torch.arange(len(ids)), ids].cpu()
        gap = (policy_logprobs - torch.tensor(server_logprobs)).abs().mean().item()
        near = NEAR[policy.model.dtype]
        if not gap < near:  # NaN too
            raise ConfigError(
                f"{self._server.name} is {gap:.3g} nats a token away from the policy on a fixed prompt; allowed: "
                f"{near:g}. It serves other weights than model.path={model.path} in {self.cfg.format.name}. {ADVICE}"
            )

    def _take_over(self) -> None:
        """Replace all adapters on the server by the adapter of this engine, and abort requests that still run there.

        Raises ConfigError if the server cannot load the adapter.
        """
        held = self._adapter_names()
        self._server.ask("POST", "/abort_requests", {})  # running requests would keep the prefix cache
        self._call_workers("qerl_clear")  # the first sync resets the prefix cache
        for name in held:
            with suppress(Refused):  # already gone
                self._server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        write_adapter_weights(self.policy.model, self._folder)
        try:
            self._server.ask("POST", "/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._folder)})
        except Refused as error:
            if "already been loaded" not in str(error):  # by an earlier try; its answer was lost
                raise ConfigError(
                    f"{self._server.name} cannot load the adapter from {self._folder} ({error}). It reads the files "
                    "itself. Type rollout.vllm_server.adapter_dir=DIR, a folder that server and trainer see under one "
                    f"path, if it does not see them. {ADVICE}"
                ) from error

    def _adapter_names(self, deadline: float | None = None) -> list[str]:
        """Return the names of the adapters on the server, which lists them as models with a parent."""
        cards = self._server.ask("GET", "/v1/models", deadline=deadline)["data"]
        return [card["id"] for card in cards if card["parent"]]

    def _require_only_adapter(self) -> None:
        """Raise EngineFailed unless this engine's adapter is the only one on the server."""
        if (held := self._adapter_names()) != [self._name]:
            what = "was taken by another run" if held else "was started again"
            raise EngineFailed(f"{self._server.name} {what}")

    def sync(self, noise: Noise) -> None:
        """Send adapter and noise to the server's workers.

        Raises EngineFailed if the server fails, if another run has taken it over, or if the adapter cannot be written.
        """
        self._require_only_adapter()
        write_adapter_weights(self.policy.model, self._folder)
        held = self._call_workers("qerl_adapter", name=self._name, folder=str(self._folder))
        if wrong := [ids for ids in held if len(ids) != 1]:
            raise EngineFailed(f"{self._server.name} answered the adapter with {wrong[0]}; allowed: one id")
        names = list(self.policy.norms)
        self._call_workers("qerl_noise", names=names, **(asdict(noise) | {"sigma": str(noise.sigma)}))
        if not self._server.ask("POST", "/reset_prefix_cache")["success"]:
            raise EngineFailed(f"{self._server.name} kept its prefix cache at a sync: it still serves other requests")

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norms back from the server. Raises EngineFailed if its workers hold different weights."""
        encoded: dict[str, list[str]] = {}
        for of_worker in self._call_workers("qerl_norms", names=list(self.policy.norms)):
            for name, weight in of_worker.items():
                if encoded.setdefault(name, weight) != weight:
                    raise EngineFailed(f"the workers of {self._server.name} hold different weights of {name}")
        names = [name for name in self.policy.norms if name in encoded]
        return {name: decode_tensor(*encoded[name]).to(self.policy.device) for name in names}

    def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call the method of `NormWorker` named `method` in every worker of the server; return a result per worker."""
        return self._server.ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample `group_size` completions of each prompt, without log-probs if top_p < 1.

        Raises EngineFailed if the server fails, needs more than rollout.vllm.timeout_minutes, or was taken over by
        another run.
        """
        started, seeds = time.perf_counter(), sampling.seeds(len(prompt_ids_P))
        # Ask for token ids, because texts are not used.
        fixed = {"model": self._name, "return_token_ids": True, "return_tokens_as_token_ids": True}
        bodies = [
            fixed | {"prompt": ids} | sampling_arguments(sampling, group_size, seed, self.policy.end_ids())
            for ids, seed in zip(prompt_ids_P, seeds, strict=True)
        ]
        minutes = self.cfg.rollout.vllm.timeout_minutes
        deadline = time.monotonic() + 60 * minutes
        pool = ThreadPoolExecutor(max(1, self.cfg.rollout.batch_size // group_size))  # one thread per group
        jobs = self._requests = [pool.submit(self._complete, body, deadline) for body in bodies]
        done, pending = 0, set(jobs)
        try:
            while pending:
                ended, pending = wait(pending, LOOK_SECONDS, FIRST_COMPLETED)
                for job in ended:
                    job.result()
                    done += 1
                on_done(group_size * len(ended))
        except Unanswered:
            raise EngineFailed(
                f"{self._server.name} finished {done} of {len(bodies)} groups in rollout.vllm.timeout_minutes="
                f"{minutes:g}. Type a larger one if that many tokens take longer."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a hanging request ends at the deadline
        groups = [job.result() for job in jobs]
        self._require_only_adapter()  # then no other run has used the server during the rollout
        return Rollout(prompt_ids_P, groups, time.perf_counter() - started)

    def _complete(self, body: dict[str, Any], deadline: float) -> list[Completion]:
        """Send the /v1/completions request `body` for one prompt; return its completions.

        Raises Unanswered if there is no answer by `deadline` (time.monotonic), EngineFailed if the request fails or
        the engine was aborted.
        """
        if self._aborted:
            raise EngineFailed("the rollout was aborted")
        try:
            answer = self._server.ask("POST", "/v1/completions", body, deadline)
        except Refused as error:
            if NO_NAN not in str(error) or body["logprobs"] is None:
                raise
            # JSON cannot carry NaN. Repeat the draws without log-probs and return NaN for all: the run ends at any NaN.
            drawn = self._complete({**body, "logprobs": None}, deadline)
            return [completion._replace(logprobs=[float("nan")] * len(completion.ids)) for completion in drawn]
        completions = []
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
            reason, logprobs = choice["finish_reason"], choice["logprobs"]
            if reason not in ("stop", "length"):
                raise EngineFailed(f"{self._server.name} ended a completion by {reason!r}; allowed: stop, length")
            completions.append(Completion(choice["token_ids"], logprobs["token_logprobs"] if logprobs else [], reason))
        return completions

    def abort(self) -> None:
        """Abort the requests under way and wait for them, at most rollout.vllm_server.patience_seconds.

        Without this the process could not exit before the server has answered them all. A server that another run has
        taken over is left alone.
        """
        self._aborted, deadline = True, time.monotonic() + self._server.patience
        while (under_way := [job for job in self._requests if not job.done()]) and time.monotonic() < deadline:
            with suppress(EngineFailed):
                if self._adapter_names(deadline) == [self._name]:
                    self._server.ask("POST", "/abort_requests", {}, deadline)
            wait(under_way, ABORT_SECONDS)
        self._requests = []  # whatever is under way now does not end within patience_seconds

    def close(self) -> None:
        """Remove the adapter's files. The server keeps the adapter until another engine takes over.

        After a failure first ends the requests under way: a request that loses its connection would read from whatever
        the process opens next under the same descriptor.
        """
        self.abort()
        self._open.close()


def format_of(name: str | None, config: dict[str, Any] | None) -> str:
    """Return the name of a server's weight format, from vLLM's quantization name and config.

    For a format that the lab does not know, return vLLM's name and the reason.
    """
    try:
        if config is None:
            return name or DENSE_FORMAT
        weight_format = formats.recognize(config).weight_format
        return f"{weight_format.NAME} with FP8 activations" if weight_format == W8A8 else weight_format.NAME
    except ValueError as error:
        return f"{name} ({error})"
