"""Run a real `vllm serve` in a separate process, with the command that users are given."""

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from qerl_lab.config.schema import RunConfig
from qerl_lab.rollout.vllm_server.server_command import commands

STARTS_WITHIN = 300  # seconds


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(cfg: RunConfig, log: Path) -> Iterator[subprocess.Popen]:
    """Pack the base if needed, and run the server of `cfg` at its URL inside the block. `log` gets its output."""
    *before_it, line = commands(cfg)
    for command in before_it:
        subprocess.run([sys.executable, *shlex.split(command)[1:]], cwd=log.parent, check=True)
    before, _, after = line.partition(" vllm serve ")
    model, *flags = shlex.split(after)
    # The `vllm` command does not find itself under the CPU wheel's package name; this is the module that it starts.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *flags]
    environment = os.environ | dict(word.split("=") for word in before.split())
    if cfg.device == "cpu" and cfg.rollout.vllm_server.tensor_parallel == 2:
        # One core each; vLLM would give each a NUMA node.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    with log.open("w") as out:
        server = subprocess.Popen(
            words, env=environment, cwd=log.parent, stdout=out, stderr=out, start_new_session=True
        )
        try:
            wait_until_it_answers(cfg.rollout.vllm_server.url, server, log)
            yield server
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)


def wait_until_it_answers(url: str, server: subprocess.Popen, log: Path) -> None:
    """Return once the server is ready. Raises RuntimeError with the end of its log if it never is."""
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass  # not yet
        time.sleep(1)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
