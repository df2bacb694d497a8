"""Secrets are hidden, and other text stays."""

import shlex

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact, redact_and_join, url_without_secrets
from qerl_lab.config.rules import from_dict

HEADS = ("gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "sk-", "xoxb-")
TOKENS = [  # of GitHub, GitLab, OpenAI and others, Slack, AWS; a JSON web token
    *(f"{head}abcdefghijklmnopqrst" for head in HEADS), "AKIAIOSFODNN7EXAMPLE", "eyJhbGciOi.eyJzdWIiOi.SflKxwRJ",
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("http://u:p@h:1/x and https://t@g", "http://***@h:1/x and https://***@g"),
        ("http://me:p/w@h:5000", "http://***@h:5000"),
        ("HTTP://me:pw@h", "HTTP://***@h"),
        ("http://me:p@ss@h:5000/a", "http://***@h:5000/a"),
        ("postgresql+psycopg2://me:pw@h/db?sslmode=on&sslpassword=pw", "postgresql+psycopg2://***@h/db?sslmode=on&sslpassword=***"),
        ("https://h/x?X-Amz-Signature=abc&a=1", "https://h/x?X-Amz-Signature=***&a=1"),
        ("HF_TOKEN=abc python -m qerl_lab seed=1", "HF_TOKEN=*** python -m qerl_lab seed=1"),
        ("hydra.job.env_set.MLFLOW_TRACKING_PASSWORD=abc", "hydra.job.env_set.MLFLOW_TRACKING_PASSWORD=***"),
        ("read with hf_abcdefghijklmnopqrst at 401", "read with *** at 401"),
        ("DB_PASS=abc GITHUB_PAT=d {'SMTP_AUTH': 'e'}", "DB_PASS=*** GITHUB_PAT=*** {'SMTP_AUTH': '***'}"),
        ("password: abc\n  api_key: 'def'", "password: ***\n  api_key: '***'"),
        ("docker --env=DB_PASS=abc", "docker --env=DB_PASS=***"),
        ("https://hooks.slack.com/services/T0/B0/xy failed", "https://hooks.slack.com/*** failed"),
        ("https://discord.com/api/webhooks/1/ab", "https://discord.com/api/webhooks/***"),
        ("GITHUBTOKEN=abc dbpassword=def", "GITHUBTOKEN=*** dbpassword=***"),
        *((f"denied to {token} here", "denied to *** here") for token in TOKENS),
        ("ghp_abcdefghijklmnopqrst, Authorization: Bearer abcdef", "***, Authorization: Bearer ***"),
    ],
)  # fmt: skip
def test_secrets_are_hidden(given: str, shown: str) -> None:
    assert redact(given) == shown


@pytest.mark.parametrize(
    "text",
    [
        "sqlite:////a/b.db", "sqlite:///me@corp/b.db", "file:///home/me@corp/x", "me@example.org",
        "rollout.max_prompt_tokens=256 rollout.max_completion_tokens=64", "http://h:5000/x?timeout=3",
        "lora.target_modules=[q_proj,k_proj]", "git@github.com:a/b", "hf_hub", "Type KEY=VALUE", "pass@k=1 bypass=1",
    ],
)  # fmt: skip
def test_the_rest_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "q")  # too short to be told from a letter
    assert redact(text) == text


def test_values_of_secret_variables_are_hidden_wherever_they_turn_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    monkeypatch.setenv("HF_TOKEN", "abcdef")
    monkeypatch.setenv("DB_PASS", "staple")
    monkeypatch.setenv("ALERTS_WEBHOOK_URL", "https://h/zzz")
    monkeypatch.setenv("SSH_AUTH_SOCK", __file__)
    assert redact("401 for correct horse, abcdef, staple, https://h/zzz") == "401 for ***, ***, ***, ***"
    assert redact(__file__) == __file__
    assert url_without_secrets("abcdef") == "abcdef"


def test_a_secret_is_hidden_although_a_shell_needs_it_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "it's 5t@ple")
    words = ["lab", "tracking.experiment=it's 5t@ple", "hydra.job.env_set.API_KEY='s3cret'", "seed=0,1"]
    hidden = ["lab", "tracking.experiment=***", "hydra.job.env_set.API_KEY='***'", "seed=0,1"]
    assert shlex.split(redact_and_join(words)) == hidden


@pytest.mark.parametrize(("key", "url"), [
    ("tracking.uri", "http://me:pa55@host/x"), ("model.path", "https://tok55@host"),
    ("task.path", "https://host/x?token=pa55"),
])  # fmt: skip
def test_a_configuration_with_a_secret_is_refused_and_not_repeated(key: str, url: str) -> None:
    node, _, leaf = key.partition(".")
    with pytest.raises(ConfigError, match=f"{key}=.*\\*\\*\\*.* Type ") as refusal:
        from_dict({node: {leaf: url}})
    assert "55" not in str(refusal.value)
