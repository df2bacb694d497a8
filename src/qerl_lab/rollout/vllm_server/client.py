"""HTTP client for one `vllm serve`: keep-alive connections, retries, errors that name the server."""

import os
import time
from typing import Any

import httpx

from qerl_lab.config.redact import redact, url_without_secrets
from qerl_lab.rollout.engine import EngineFailed

API_KEY = "VLLM_API_KEY"  # vLLM's own environment variable
PAUSE_SECONDS, CONNECT_SECONDS, ANSWER_SECONDS = 0.5, 10.0, 120.0
ADVICE = "Type python -m qerl_lab.tools.serve_line and the overrides of this run for the command that starts it right."
AWAY_STATUSES = (502, 503, 504)  # HTTP statuses of a proxy, or of a server that shuts down


class Refused(EngineFailed):
    """The server answered with an error."""


class Unanswered(EngineFailed):
    """The server did not answer a request in time."""


class ServerClient:
    """Client of the vLLM server at `url`, usable from several threads.

    It retries a lost connection for `patience` seconds, and opens at most `connections` connections.
    """

    def __init__(self, url: str, patience: float, connections: int) -> None:
        self.name = f"the vLLM server at {url_without_secrets(url)}"
        self.patience = patience
        key = os.environ.get(API_KEY)
        # Setting a transport also makes httpx ignore HTTP_PROXY, which it would use even for a server on loopback.
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._client = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=httpx.HTTPTransport(limits=limits),
        )

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None, deadline: float | None = None) -> Any:
        """Send an HTTP request and return the parsed JSON answer, or None if the answer is no JSON.

        The request must be safe to repeat: after a lost connection it is sent again for `patience` seconds, although
        the server may have handled it already. Each try may take ANSWER_SECONDS. With a `deadline` (time.monotonic) a
        try may take until then, and no other begins after it.

        Raises Refused if the server answers with an error or a web page, Unanswered if it gives no answer in time, and
        EngineFailed if it cannot be reached or wants an API key.
        """
        lost = None
        while True:
            seconds = ANSWER_SECONDS if deadline is None else max(0.01, deadline - time.monotonic())
            timeout = httpx.Timeout(seconds, connect=CONNECT_SECONDS)
            try:
                response = self._client.request(method, path, json=body, timeout=timeout)
                if response.status_code not in AWAY_STATUSES:
                    break
                why = f"HTTP {response.status_code}"
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
                raise Unanswered(f"{self.name} did not answer {path}") from None
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {redact(str(error)) or 'no message'}"
            now = time.monotonic()
            lost = lost or now
            if now - lost >= self.patience or (deadline is not None and now >= deadline):
                raise EngineFailed(
                    f"{self.name} is away ({why}): tried for {min(now - lost, self.patience):.3g} s (at most "
                    f"rollout.vllm_server.patience_seconds). {ADVICE} If the server is elsewhere, type "
                    "rollout.vllm_server.url=URL."
                )
            time.sleep(min(PAUSE_SECONDS, self.patience))
        kind = response.headers.get("content-type", "")
        if not response.is_success or "html" in kind:  # a proxy may send a page to log in on
            answer = redact(" ".join(response.text.split()))[:500]
            refused = f"{self.name} refuses {path} (HTTP {response.status_code}: {answer})"
            if response.status_code in (401, 403):
                raise EngineFailed(f"{refused}. Type the server's key into the environment variable {API_KEY}.")
            raise Refused(refused)
        return response.json() if "json" in kind else None

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()
