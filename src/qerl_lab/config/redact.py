"""Hide passwords and tokens in what is written and printed. Imports nothing of ours."""

import os
import re
import shlex
from collections.abc import Iterable

HIDDEN = "***"
# Words in names of secrets: DB_PASS, GITHUB_PAT, WEBHOOK_URL. `key` counts only after another word: API_KEY.
SECRET_WORDS = {
    "token", "pass", "password", "passwd", "passphrase", "pwd", "secret", "secrets", "pat", "auth", "credential",
    "credentials", "dsn", "webhook", "apikey",
}  # fmt: skip
_IN_A_URL = r"(?:token|pass|pwd|secret|key|sig|auth|cred)"
# Greedy on purpose: a raw password may contain / and @. A URL without a host (sqlite:///a@b) has no user.
_USER = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/]\S*@", re.IGNORECASE)
_PARAMETER = re.compile(rf"([?&;][\w.-]*{_IN_A_URL}[\w.-]*=)[^\s&;'\"]+", re.IGNORECASE)
_NAME = re.compile(r"\b(\w+)['\"]?[=:]")  # in NAME=value, 'NAME': 'value', and NAME: value of YAML
_WEBHOOK = re.compile(r"(https?://[^\s'\"]*?(?:\bhooks?\.[^\s/'\"]+|/(?:web)?hooks?)/)[^\s'\"]+", re.IGNORECASE)
_TOKEN = re.compile(  # tokens of the hub, GitHub, GitLab, OpenAI and others, Slack, AWS; a JSON web token; a header
    r"\b(?:hf_|github_pat_|gh[opsur]_|glpat-|sk-|xox[a-z]-|AKIA)[\w-]{16,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
    r"|(?<=Bearer )[\w.~+/=-]{6,}"
)
SHORTEST = 6  # a shorter secret could be any word of a message


def url_without_secrets(url: str) -> str:
    """Replace user, password and secret query values of a URL by ***; return any other URL unchanged."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", url))


def redact(text: str) -> str:
    """Replace secrets in a text by ***: passwords in URLs, NAME_TOKEN=value, known tokens, secret environment values.

    A variable that holds an existing path, such as SSH_AUTH_SOCK, is not secret. Redact a text before it is quoted for
    a shell or encoded as JSON: a quoted secret is not found, and JSON without an escape character is broken.
    """
    for name, value in os.environ.items():
        if _is_secret_name(name) and len(value) >= SHORTEST and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    for name in filter(_is_secret_name, set(_NAME.findall(text))):
        text = re.sub(rf"(\b{name}['\"]?(?:=|: ?)['\"]?)[^\s'\"]+", rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, url_without_secrets(_WEBHOOK.sub(rf"\1{HIDDEN}", text)))


def redact_and_join(words: Iterable[str]) -> str:
    """Join the words of a command to a line for a shell, with their secrets replaced by ***."""
    return shlex.join(map(redact, words))


def _is_secret_name(name: str) -> bool:
    """Tell whether a variable or key of this name holds a secret, such as HF_TOKEN."""
    words = name.lower().split("_")
    return not SECRET_WORDS.isdisjoint(words) or "key" in words[1:] or words[-1].endswith(("token", "password"))
