"""Hide passwords and tokens in what is written and printed. Imports nothing of ours."""

import os
import re

HIDDEN = "***"
# Part of a name, between underscores, of what is secret: DB_PASS, GITHUB_PAT, api_key, WEBHOOK_URL.
_NAME = (
    r"(?:[a-z0-9_]*_)?(?:token|pass(?:word|wd|phrase)?|pwd|secrets?|pat|auth|credentials?|dsn|webhook|"
    r"(?<=_)key|apikey)(?:_[a-z0-9_]+)?"
)
_IN_A_URL = r"(?:token|pass|pwd|secret|key|sig|auth|cred)"
# Greedy on purpose: a raw password may contain / and @. A URL without a host (sqlite:///a@b) has no user.
_USER = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/]\S*@", re.IGNORECASE)
_PARAMETER = re.compile(rf"([?&;][\w.-]*{_IN_A_URL}[\w.-]*=)[^\s&;'\"]+", re.IGNORECASE)
_VARIABLE = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(rf"((?<![a-z0-9_]){_NAME}(?:=|['\"]: ?)['\"]?)[^\s'\"]+", re.IGNORECASE)
_WEBHOOK = re.compile(r"(https?://[^\s'\"]*?(?:\bhooks?\.[^\s/'\"]+|/(?:web)?hooks?)/)[^\s'\"]+", re.IGNORECASE)
_TOKEN = re.compile(  # of the hub, GitHub, GitLab, OpenAI and others, Slack, AWS; a JSON web token; a header
    r"\b(?:hf_|github_pat_|gh[opsur]_|glpat-|sk-|xox[a-z]-|AKIA)[\w-]{16,}|\beyJ[\w-]+\.[\w-]+\.[\w-]+"
    r"|(?<=Bearer )[\w.~+/=-]{6,}"
)
SHORTEST = 6  # a shorter secret could be any word of a message


def url_without_secrets(url: str) -> str:
    """Hide user, password and secret query values of a URL; return any other URL unchanged."""
    return _PARAMETER.sub(rf"\1{HIDDEN}", _USER.sub(rf"\1{HIDDEN}@", url))


def redact(text: str) -> str:
    """Hide secrets in text: those of URLs, NAME_TOKEN=value, known tokens, and values of secret environment variables.

    A variable that holds a path, such as SSH_AUTH_SOCK, is not secret.
    """
    for name, value in os.environ.items():
        if _VARIABLE.fullmatch(name) and len(value) >= SHORTEST and not os.path.exists(value):
            text = text.replace(value, HIDDEN)
    for secret in (_ASSIGNED, _WEBHOOK):
        text = secret.sub(rf"\1{HIDDEN}", text)
    return _TOKEN.sub(HIDDEN, url_without_secrets(text))
