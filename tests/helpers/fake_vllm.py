"""A server with the endpoints of `vllm serve`, on a thread, that fails on request.

Its answers come from the given policy: its norms, and its log-probs of a fixed completion.
tests/unit/rollout/test_contract.py runs the engine on a real server.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer

from qerl_lab.aqn import Noise
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.vllm.transfer import encode_tensor
from waiting import wait_for

DROP, LOSE = "drop", "lose"  # faults: close the connection without an answer, before or after acting
Answer = tuple[int, Any]  # HTTP status, and JSON or the text of a web page


def refusal(status: int, message: str) -> Answer:
    """Return an error in vLLM's form."""
    return status, {"error": {"message": message, "type": "BadRequestError", "code": status}}


@dataclass
class FakeVllm:
    """State of the server. Tests change `described`, `norms` and so on, and put the next failures into `faults`."""

    policy: Policy
    workers: int = 1
    described: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, str] = field(default_factory=dict)  # name -> folder
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)  # (path, body) of every request
    headers: list[dict[str, str]] = field(default_factory=list)
    faults: dict[str, list[Any]] = field(
        default_factory=dict
    )  # path -> DROP, LOSE, an Answer, or a function that changes the true one
    hold_seconds: float = 0.0  # duration of a completion
    at_once: int = 0  # completions running now
    most_at_once: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.norms = {name: norm.data.clone() for name, norm in self.policy.norms.items()}
        self.lock = threading.Lock()
        self.aborted = threading.Event()  # set at an abort, which leaves a new one for later requests
        self.described = {
            "dtype": "float32", "quantization": None, "quantization_config": None,
            "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "max_lora_rank": 8, "max_loras": 1,
            "kv_cache_dtype": "auto", "linear_backend": "auto", "max_model_len": 512,
        } | self.described  # fmt: skip

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the real server's answer."""
        match path:
            case "/v1/models":
                cards = [{"id": "base", "parent": None}]
                cards += [{"id": name, "parent": "base"} for name in self.adapters]
                return 200, {"data": cards}
            case "/v1/load_lora_adapter":
                name, folder = body["lora_name"], Path(body["lora_path"])
                if name in self.adapters:
                    return refusal(400, f"The lora adapter '{name}' has already been loaded.")
                if not {"adapter_config.json", "adapter_model.safetensors"} <= {f.name for f in folder.glob("*")}:
                    return refusal(404, f"No adapter found for {folder}")
                self.adapters[name] = str(folder)
                return 200, None
            case "/v1/unload_lora_adapter":
                if self.adapters.pop(body["lora_name"], None) is None:
                    return refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
                return 200, None
            case "/abort_requests":
                aborted, self.aborted = self.aborted, threading.Event()
                aborted.set()
                return 200, {"status": "aborted", "aborted": 0}
            case "/reset_prefix_cache":
                return 200, {"success": True}
            case "/collective_rpc":
                said = self.rpc(body["method"], body.get("kwargs", {}))
                return 200, {"results": [said] * self.workers}
            case "/v1/completions":
                return self.complete(body)
        return refusal(404, "Not Found")

    def rpc(self, method: str, given: dict[str, Any]) -> Any:
        match method:
            case "qerl_describe":
                return self.described
            case "qerl_adapter":
                return [1]
            case "qerl_adapted":
                modules = self.policy.model.get_base_model().named_modules()
                return [name for name, layer in modules if isinstance(layer, LoraLayer)]
            case "qerl_noise":
                noise = Noise(float(given["sigma"]), given["seed"], given["step"], given["relative"])
                self.norms = noise.onto_norms(self.policy.clean_norms)
            case "qerl_norms":
                return {name: encode_tensor(self.norms[name]) for name in given["names"] if name in self.norms}
        return None

    def complete(self, body: dict[str, Any]) -> Answer:
        if body["model"] not in self.adapters:
            return refusal(404, f"The model `{body['model']}` does not exist.")
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        reason = "abort" if self.aborted.wait(self.hold_seconds) else "length"
        with self.lock:
            self.at_once -= 1
            logprobs = self.logprobs(body["prompt"], body["max_tokens"])
        choices = [  # the last first; the first has tokens 5, as `logprobs` has them
            {"index": index, "token_ids": [5 + index] * body["max_tokens"], "finish_reason": reason,
             "logprobs": None if body["logprobs"] is None else {"token_logprobs": logprobs}}
            for index in reversed(range(body["n"]))
        ]  # fmt: skip
        return 200, {"choices": choices}

    def logprobs(self, prompt: list[int], count: int) -> list[float]:
        """Return the policy's log-probs of `count` tokens 5 after the prompt."""
        with torch.no_grad():
            logits = self.policy.model(input_ids=torch.tensor([prompt + [5] * count])).logits[0]
        return logits[len(prompt) - 1 : -1].log_softmax(-1)[:, 5].tolist()


@contextmanager
def running(fake: FakeVllm) -> Iterator[FakeVllm]:
    """Serve on a free loopback port."""

    connections: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise the body, a second write, waits 40 ms for an ACK

        def setup(self) -> None:
            super().setup()
            connections.append(self.connection)

        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = json.loads(text, parse_constant=not_standard) if text else {}
            fake.asked.append((self.path, body))
            fake.headers.append(dict(self.headers))
            fault = fake.faults[self.path].pop(0) if fake.faults.get(self.path) else None
            if fault == LOSE:
                fake.answer(self.path, body)
            if fault in (DROP, LOSE):
                self.close_connection = True
                return
            status, said = fault if isinstance(fault, tuple) else fake.answer(self.path, body)
            if callable(fault):
                said = fault(said)
            is_page = isinstance(said, str)
            content = said.encode() if is_page else b"" if said is None else json.dumps(said).encode()
            self.send_response(status)
            kind = "text/html" if is_page else "application/json" if content else "text/plain"
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield fake
    finally:
        fake.aborted.set()  # a completion that computed while the process exits would end the process with SIGABRT
        wait_for(lambda: not fake.at_once)
        with fake.lock:
            pass
        server.shutdown()
        server.server_close()
        for connection in connections:  # close kept-alive connections, as a real server's exit does
            with suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)


def not_standard(constant: str) -> Callable:
    raise ValueError(f"{constant} is no JSON")
