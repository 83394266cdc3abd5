"""Credentials are hidden wherever a configuration is printed, and nothing else is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from disagg.config import Deployment
from disagg.config_file import explain
from disagg.preflight.pool_checks import pool_problems
from disagg.preflight.resolved_plan import resolve
from disagg.redaction import HIDDEN, hidden

VALUE = "hunter2-hunter2"
HELD = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUBTOKEN", "API_TOKENS", "OPENAI_API_KEY",
    "OPENAI_APIKEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_KEY", "SSH_PRIVATE_KEY", "PASSWORD", "PGPASSWORD", "DB_PASSWD", "DB_PASS",
    "MYSQL_PWD", "SSH_AUTH_SOCK", "BASIC_AUTH", "SENTRY_DSN", "GOOGLE_APPLICATION_CREDENTIALS",
    "CREDENTIAL", "SESSION_COOKIE", "COOKIE", "MY-SECRET", "secret", "clientSecret",
    "GPG_PASSPHRASE", "BEARER_VALUE", "api_keys", "hf_token", "token", "key",
]  # fmt: skip
SHOWN = [
    "HF_HOME", "VLLM_LOGGING_LEVEL", "PYTHONHASHSEED", "NCCL_SOCKET_IFNAME",
    "CUDA_VISIBLE_DEVICES", "TMPDIR", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "tokenizer",
    "tokenizer_mode", "KEYBOARD_LAYOUT", "AUTHOR", "PATH", "dtype", "kv_cache_dtype",
    "VLLM_RPC_BASE_PATH",
]  # fmt: skip


@pytest.mark.parametrize("name", HELD)
def test_names_that_hold_a_credential(name: str) -> None:
    assert hidden({name: VALUE}) == {name: HIDDEN}
    assert hidden({"x": [{name: [VALUE]}]}) == {"x": [{name: HIDDEN}]}


@pytest.mark.parametrize("name", SHOWN)
def test_names_that_hold_none(name: str) -> None:
    assert hidden({name: VALUE}) == {name: VALUE}


def test_numbers() -> None:
    counts = {"MAX_TOKENS": "512", "max_num_batched_tokens": 64, "num_key_value_heads": 8}
    assert hidden(counts) == counts
    assert hidden({"password": 12345678}) == {"password": HIDDEN}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (f"postgres://me:{VALUE}@db/x", f"postgres://{HIDDEN}@db/x"),
        (f"see https://{VALUE}@host/x.git", f"see https://{HIDDEN}@host/x.git"),
        (f"redis://:{VALUE}@r:6379/0", f"redis://{HIDDEN}@r:6379/0"),
        (f"https://u:a@b:{VALUE}@h/", f"https://{HIDDEN}@h/"),
        (f"https://h/x?sig={VALUE}&n=1", f"https://h/x?sig={HIDDEN}&n=1"),
        (f"Server=db;Password={VALUE};Pool=4", f"Server=db;Password={HIDDEN};Pool=4"),
        (f"http://h:8000/v1?api_key={VALUE}", f"http://h:8000/v1?api_key={HIDDEN}"),
        ("http://h:8000/v1?page=2", "http://h:8000/v1?page=2"),
        ("/a/path@with-at", "/a/path@with-at"),
    ],
)
def test_credentials_within_a_value(value: str, shown: str) -> None:
    assert hidden({"PROXY": value}) == {"PROXY": shown}


def deployment(tmp_path: Path, **engine: Any) -> Deployment:
    return Deployment.model_validate({"model": {"path": str(tmp_path)}, "engine": engine})


def test_a_plan_shows_none(tmp_path: Path) -> None:
    env = {**dict.fromkeys((n for n in HELD if n.isidentifier()), VALUE), "HF_HOME": "/models"}
    env["HTTPS_PROXY"] = f"http://me:{VALUE}@proxy:3128"
    given = deployment(tmp_path, env=env, args={"hf_token": VALUE, "dtype": "float32"})
    plan = resolve(given)
    assert VALUE not in repr(plan)
    assert plan["decode"]["env"]["HF_HOME"] == "/models"
    assert plan["decode"]["env"]["HF_TOKEN"] == HIDDEN
    assert plan["decode"]["args"]["dtype"] == "float32"
    assert VALUE not in repr(given), "what prints a specification prints no variable"


@pytest.mark.parametrize(
    "env", [{"HF_TOKEN": [VALUE]}, {"X": {"Y": VALUE}}, [f"X={VALUE}"], f"HF_TOKEN={VALUE}"]
)
def test_problems_of_the_file_show_none(tmp_path: Path, env: object) -> None:
    with pytest.raises(ValidationError) as error:
        deployment(tmp_path, env=env)
    lines = explain(error.value, Deployment)
    assert len(lines) == 1
    assert "engine.env" in lines[0]
    assert VALUE not in lines[0]


def test_problems_of_arguments_show_none(tmp_path: Path) -> None:
    given = deployment(tmp_path, args={"api_key": VALUE})
    lines = list(pool_problems(given, None))
    assert any("engine.args.api_key" in line for line in lines)
    assert VALUE not in "\n".join(lines)
