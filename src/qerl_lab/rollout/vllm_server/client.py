"""HTTP to one `vllm serve`: keep-alive connections, lost ones tried again with backoff. Errors name the server."""

import os
import socket
import time
from typing import Any

import httpx

from qerl_lab.config.redact import redact, url_without_secrets
from qerl_lab.rollout.engine import EngineFailed

API_KEY = "VLLM_API_KEY"  # the variable that vLLM itself reads it from
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 10.0  # seconds between tries; each is twice the last
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 120.0
AWAY = (502, 503, 504)  # what a proxy, or a server that ends, answers in the place of one that works
# A host that vanished sends nothing, for as long as a rollout may take: the system asks it twice a minute.
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)  # macOS has not all of them
]


class Refused(Exception):
    """The server answered with an error. `status` is HTTP's; the message is the server's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """The server at `url`, for several threads at once. `patience` is how many seconds a lost connection is retried."""

    def __init__(self, url: str, patience: float, connections: int) -> None:
        self.name = f"the vLLM server at {url_without_secrets(url)}"
        self.patience = patience
        key = os.environ.get(API_KEY)
        # A transport of our own also leaves HTTP_PROXY unread, which would be asked for a server on loopback.
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=httpx.HTTPTransport(limits=limits, socket_options=KEEP_ALIVE),
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> Any:
        """Return what the server answers: parsed JSON, or None where it says nothing but yes.

        Asking twice must do no harm, since an answer may be lost. Without `seconds` there are `ANSWER_SECONDS`, and
        `patience` more, for a server that comes back at the end of it.

        Raises:
            Refused: the server answered with an error.
            TimeoutError: no answer came in `seconds`.
            EngineFailed: there is no server, or no JSON.
        """
        seconds = ANSWER_SECONDS + self.patience if seconds is None else seconds
        response = self._response(method, path, body, seconds)
        if response.is_error:
            raise Refused(response.status_code, redact(message_of(response)))
        if not response.content or "json" not in response.headers.get("content-type", ""):
            return None
        try:
            return response.json()
        except ValueError as error:
            raise EngineFailed(f"{self.name} answered {path} with what is no JSON ({error})") from error

    def _response(self, method: str, path: str, body: dict[str, Any] | None, seconds: float) -> httpx.Response:
        """Send until there is an answer, a pause after each lost connection. Raises TimeoutError and EngineFailed."""
        started, pause, tries = time.monotonic(), FIRST_PAUSE, 0
        lost = None  # when the connection was
        while True:
            tries += 1
            left = seconds - (time.monotonic() - started)
            if left <= 0:
                raise TimeoutError
            try:
                timeout = httpx.Timeout(left, connect=min(left, CONNECT_SECONDS))
                response = self._client.request(method, path, json=body, timeout=timeout)
                if response.status_code not in AWAY:
                    return response
                why = f"HTTP {response.status_code}"
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
                raise TimeoutError from None
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {redact(str(error)) or 'no message'}"
            lost = lost or time.monotonic()
            waited = time.monotonic() - lost
            if waited >= self.patience:
                raise EngineFailed(
                    f"{self.name} is away ({why}): tried {tries} times in {waited:.0f} s "
                    "(rollout.vllm_server.patience_seconds). Type python -m qerl_lab.tools.serve_line and the words "
                    "of this run for the command that starts it, or rollout.vllm_server.url=URL if it is elsewhere."
                )
            time.sleep(min(pause, self.patience - waited))
            pause = min(2 * pause, LONGEST_PAUSE)

    def close(self) -> None:
        self._client.close()


def message_of(response: httpx.Response) -> str:
    """The first line of the server's own words, which it puts under one of several keys."""
    try:
        said = response.json()
    except ValueError:
        said = response.text
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return next(iter(str(said).strip().splitlines()), f"HTTP {response.status_code}")[:500]
