"""Rollout engine on a `vllm serve` on other GPUs or hosts; completions, adapter and norms go over its endpoints.

Uses vLLM's HTTP interface and `vllm.worker.NormWorker`, the server's worker class. The adapter's files lie in a folder
that trainer and server see. `serve_line` prints the command that starts the server.
"""

import secrets
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import EngineFailed, OnDone, Rollout, Sampling, do_nothing
from qerl_lab.rollout.vllm.base import scratch_folder
from qerl_lab.rollout.vllm.transfer import (
    adapter_bytes,
    check_norms,
    decode_tensor,
    sampling_arguments,
    write_settings,
    write_weights,
)
from qerl_lab.rollout.vllm_server import agreement
from qerl_lab.rollout.vllm_server.client import Refused, Server, Unanswered

NO_NAN = "not JSON compliant"  # Python's json error for a NaN, passed on by the server
PROCESS = f"policy-{secrets.token_hex(4)}"  # prefix of this process's adapter names
HAD: set[str] = set()  # names of servers that this process took over
Completion = tuple[list[int], list[float], str]  # token ids, log-probs, finish reason


class VllmServerEngine:
    """Engine on the server at `rollout.vllm_server.url`, which serves `policy`'s base to one run at a time.

    Seeds determine the draws as in `vllm_engine`. Raises ConfigError if there is no server, or it serves another model
    or with other settings.
    """

    linear_backend = None  # chosen by the server

    def __init__(self, policy: Policy, cfg: RunConfig) -> None:
        self.policy, self.cfg, own = policy, cfg, cfg.rollout.vllm_server
        self._open = ExitStack()
        self._server = Server(own.url, own.patience_seconds, cfg.rollout.batch_size)
        self._open.callback(self._server.close)
        self._name = f"{PROCESS}-{secrets.token_hex(4)}"  # unique to this engine
        try:
            self._folder = Path(self._open.enter_context(self._temporary_folder()))
            write_settings(policy.model, self._folder)
            agreement.check_settings(self._server, cfg, policy)
            self._take_over()
            self.sync(CLEAN)
            check_norms(self.norms(), policy.clean_norms, self._server.name, agreement.LINE)
            agreement.check_logprobs(self._server, self, policy, cfg)
        except BaseException:
            self.close()
            raise

    def _temporary_folder(self) -> AbstractContextManager[str | Path]:
        """Make a folder for the adapter's files: in `adapter_dir`, or in this machine's memory without it."""
        if (shared := self.cfg.rollout.vllm_server.adapter_dir) is None:
            return scratch_folder(adapter_bytes(self.policy.model))
        Path(shared).mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="qerl-lab-", dir=Path(shared).absolute())

    def _take_over(self) -> None:
        """Make this engine's adapter the only one on the server. Other engines' requests fail from then on.

        Raises EngineFailed if this process used the server before and another run has it now. The last run to start
        keeps the server; otherwise two runs would take it from each other in the middle of completions.
        """
        held = self._adapter_names()
        if self._server.name in HAD and any(not name.startswith(f"{PROCESS}-") for name in held):
            raise EngineFailed(f"{self._server.name} was taken by another run")
        HAD.add(self._server.name)
        self._server.ask("POST", "/abort_requests", {})  # running requests would keep the prefix cache
        self._call_workers("qerl_clear")  # the first sync resets the prefix cache
        for name in held:
            with suppress(Refused):  # already gone
                self._server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        write_weights(self.policy.model, self._folder)
        try:
            self._server.ask("POST", "/v1/load_lora_adapter", {"lora_name": self._name, "lora_path": str(self._folder)})
        except Refused as error:
            if "already been loaded" not in str(error):  # by an earlier try whose answer was lost
                raise ConfigError(
                    f"{self._server.name} cannot load the adapter from {self._folder} ({error}). It reads the files "
                    "itself. Type rollout.vllm_server.adapter_dir=DIR, a folder that server and trainer see under one "
                    f"path, if it does not see them. {agreement.LINE}"
                ) from error

    def _adapter_names(self) -> list[str]:
        """Return the names of the adapters on the server: models that have a parent."""
        cards = self._server.ask("GET", "/v1/models")["data"]
        return [card["id"] for card in cards if card["parent"]]

    def _require_only_adapter(self) -> None:
        """Raise EngineFailed unless this engine's adapter is the only one on the server."""
        if (held := self._adapter_names()) != [self._name]:
            what = "was taken by another run" if held else "was started again"
            raise EngineFailed(f"{self._server.name} {what}")

    def sync(self, noise: Noise) -> None:
        """Send the policy's adapter and the noise's parameters to the server's workers, and reset the prefix cache."""
        self._require_only_adapter()
        write_weights(self.policy.model, self._folder)
        held = self._call_workers("qerl_adapter", name=self._name, folder=str(self._folder))
        if wrong := [ids for ids in held if len(ids) != 1]:
            raise EngineFailed(f"{self._server.name} answered the adapter with {wrong[0]}; allowed: one id")
        names = list(self.policy.norms)
        self._call_workers("qerl_noise", names=names, **(asdict(noise) | {"sigma": str(noise.sigma)}))
        if not self._server.ask("POST", "/reset_prefix_cache")["success"]:
            raise EngineFailed(f"{self._server.name} kept its prefix cache at a sync: it still serves other requests")

    def sleep(self) -> None:
        """Do nothing, because the server has its own memory."""

    def norms(self) -> dict[str, Tensor]:
        """Read the noisy norms back from the server. Raises EngineFailed if its workers hold different ones."""
        found: dict[str, list[str]] = {}
        for held in self._call_workers("qerl_norms", names=list(self.policy.norms)):
            if differ := [name for name, weight in held.items() if found.setdefault(name, weight) != weight]:
                raise EngineFailed(f"the workers of {self._server.name} hold different weights of {differ[0]}")
        return {name: decode_tensor(*found[name]).to(self.policy.device) for name in self.policy.norms if name in found}

    def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Call a method of `NormWorker` in every worker; return the results."""
        return self._server.ask("POST", "/collective_rpc", {"method": method, "kwargs": arguments})["results"]

    def generate(
        self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling, on_done: OnDone = do_nothing
    ) -> Rollout:
        """Sample `group_size` completions of each prompt. The log-probs are empty with top_p < 1.

        Raises EngineFailed if the server is away or takes longer than rollout.vllm.timeout_minutes.
        """
        started, seeds = time.perf_counter(), sampling.seeds(len(prompt_ids_P))
        # As ids, because texts are not used.
        fixed = {"model": self._name, "return_token_ids": True, "return_tokens_as_token_ids": True}
        bodies = [
            fixed | {"prompt": ids} | sampling_arguments(sampling, group_size, seed, self.policy.end_ids())
            for ids, seed in zip(prompt_ids_P, seeds, strict=True)
        ]
        groups = self._complete_all(bodies, group_size, on_done)
        self._require_only_adapter()  # so it was during the whole rollout
        return Rollout(
            prompt_ids_P=prompt_ids_P,
            completion_ids_P_G=[[ids for ids, _, _ in group] for group in groups],
            logprobs_P_G=[[logprobs for _, logprobs, _ in group] for group in groups],
            finish_reasons_P_G=[[reason for _, _, reason in group] for group in groups],
            entropy=None,
            seconds=time.perf_counter() - started,
        )

    def _complete_all(self, bodies: list[dict[str, Any]], group_size: int, on_done: OnDone) -> list[list[Completion]]:
        """Send all requests, as many at once as the batch holds; return the completions of each prompt."""
        minutes = self.cfg.rollout.vllm.timeout_minutes
        deadline = time.monotonic() + 60 * minutes
        pool = ThreadPoolExecutor(max(1, self.cfg.rollout.batch_size // group_size))  # one thread per group
        jobs = [pool.submit(self._complete, body, deadline) for body in bodies]
        done = 0
        try:
            for job in as_completed(jobs):
                job.result()
                done += 1
                on_done(group_size)
        except Unanswered:
            raise EngineFailed(
                f"{self._server.name} finished {done} of {len(bodies)} groups in rollout.vllm.timeout_minutes="
                f"{minutes:g}. Type a larger one if that many tokens take longer."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # a hanging request ends at the deadline
        return [job.result() for job in jobs]

    def _complete(self, body: dict[str, Any], deadline: float) -> list[Completion]:
        """Request the completions of one prompt. Raises EngineFailed, which is Unanswered after the deadline."""
        try:
            answer = self._server.ask("POST", "/v1/completions", body, max(0.01, deadline - time.monotonic()))
        except Refused as error:
            if NO_NAN not in str(error) or body["logprobs"] is None:
                raise
            # JSON cannot carry NaN. Repeat the draws without log-probs and return NaN for all: the run ends at any NaN.
            drawn = self._complete({**body, "logprobs": None}, deadline)
            return [(ids, [float("nan")] * len(ids), reason) for ids, _, reason in drawn]
        return completions(answer, self._server.name)

    def held(self) -> dict[str, int]:
        """Return no bytes, because the server has its own memory."""
        return {}

    def close(self) -> None:
        """Remove the adapter's files. The server keeps the adapter until another engine takes over."""
        self._open.close()


def completions(answer: Any, name: str) -> list[Completion]:
    """Parse an answer of /v1/completions. Raises EngineFailed, naming the server, if a completion was aborted."""
    found = []
    for choice in sorted(answer["choices"], key=lambda choice: choice["index"]):
        reason, logprobs = choice["finish_reason"], choice["logprobs"]
        if reason not in ("stop", "length"):
            raise EngineFailed(f"{name} ended a completion by {reason!r}; allowed: stop, length")
        found.append((choice["token_ids"], logprobs["token_logprobs"] if logprobs else [], reason))
    return found
