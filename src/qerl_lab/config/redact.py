"""Hide passwords and tokens in what is written and printed. Imports nothing of ours."""

import os
import re

HIDDEN = "***"
_SECRET = r"(?:token|pass|pwd|secret|key|sig|auth|cred)"
# Greedy on purpose: a raw password may contain / and @. A URL without a host (sqlite:///a@b) has no user.
_USER = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/]\S*@", re.IGNORECASE)
_PARAMETER = re.compile(rf"([?&;][\w.-]*{_SECRET}[\w.-]*=)[^\s&;'\"]+", re.IGNORECASE)
_ASSIGNED = re.compile(r"(\b\w*(?:token|password|passwd|secret|api_key|access_key)=)[^\s'\"]+", re.IGNORECASE)
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_VARIABLE = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|ACCESS_KEY)$")
SHORTEST = 6  # a shorter secret could be any word of a message


def url_without_secrets(url: str) -> str:
    """Hide user, password and secret query values of a URL; return any other URL unchanged."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", url))


def redact(text: str) -> str:
    """Hide secrets in text: those of URLs, NAME_TOKEN=value, hub tokens, and values of secret environment variables."""
    for name, value in os.environ.items():
        if _VARIABLE.search(name) and len(value) >= SHORTEST:
            text = text.replace(value, HIDDEN)
    return _HUB_TOKEN.sub(HIDDEN, _ASSIGNED.sub(rf"\1{HIDDEN}", url_without_secrets(text)))
