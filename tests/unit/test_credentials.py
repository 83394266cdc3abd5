"""Secrets, API keys and TLS files: each problem is one line, which shows no secret."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from unit.router.conftest import certificate

from disagg import credentials
from disagg.config import Deployment, RouterSection
from disagg.credentials import ApiKey
from disagg.errors import ConfigError


def deployment_with(**sections: Any) -> Deployment:
    return Deployment.model_validate({"model": {"path": "org/name"}, **sections})


def test_without_one_the_secret_is_fresh_each_time() -> None:
    first, second = credentials.secret(deployment_with()), credentials.secret(deployment_with())
    assert first != second
    assert len(first) == 64


def test_the_secret_comes_from_the_variable_or_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", "v" * 20)
    (tmp_path / "secret").write_text("f" * 20 + "\n")
    (tmp_path / "secret").chmod(0o600)
    assert credentials.secret(deployment_with(transfer={"secret_env": "MY_SECRET"})) == "v" * 20
    in_file = {"secret_file": str(tmp_path / "secret")}
    assert credentials.secret(deployment_with(transfer=in_file)) == "f" * 20


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"secret_env": "MY_SECRET"}, "this variable is not set; export it"),
        ({"secret_file": "/nonexistent/secret"}, "No such file or directory"),
        ({"secret_env": "A", "secret_file": "/b"}, "transfer.secret_file is set too"),
    ],
)
def test_a_secret_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, transfer: dict[str, str], words: str
) -> None:
    monkeypatch.delenv("MY_SECRET", raising=False)
    with pytest.raises(ConfigError, match=words):
        credentials.secret(deployment_with(transfer=transfer))


def test_a_short_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "hunter2")
    with pytest.raises(ConfigError, match="7 characters") as caught:
        credentials.secret(deployment_with(transfer={"secret_env": "MY_SECRET"}))
    assert "hunter2" not in str(caught.value)


def keys(text: str, folder: Path) -> tuple[ApiKey, ...]:
    (folder / "keys").write_text(text)
    (folder / "keys").chmod(0o600)
    return credentials.api_keys(RouterSection(api_keys_file=folder / "keys"))


def test_api_keys_are_split_at_commas_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert credentials.api_keys(RouterSection()) == ()
    monkeypatch.setenv("KEYS", "one, ann = two,")
    from_env = credentials.api_keys(RouterSection(api_keys_env="KEYS"))
    assert from_env == (ApiKey(None, "one"), ApiKey("ann", "two"))
    assert keys("# all, of them\n\nthree # no name\nbob@x.org=fo#ur=\n", tmp_path) == (
        ApiKey(None, "three"),
        ApiKey("bob@x.org", "fo#ur="),
    )
    # Two keys may have one name: that is how a client changes its key.
    assert [key.name for key in keys("ann=old\nann=new", tmp_path)] == ["ann", "ann"]
    assert "old" not in repr(keys("ann=old", tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (" , \n# nothing", "no key in it"),
        ("a=secret1\nb=secret2,c=secret1", "key 3 is the same as key 1"),
        ("ann=", "key 1 is empty after its first ="),
        ("fine,c2VjcmV0MQ==", "key 2 is empty after its first ="),
        ("secret1+/=x", "key 1 has no name"),
        ("ann=secret1 secret2", "key 1 holds a space"),
        ("secret1\u00e9", "key 1 holds a space or a character that is not ASCII"),
    ],
)
def test_wrong_keys_are_refused_and_not_shown(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"^router\.api_keys_file: ") as caught:
        keys(text, tmp_path)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "c2Vj" not in str(caught.value)


def test_operators_keys_are_told_from_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "admins"
    file.write_text("eve=of-eve\nof-anybody\n")
    file.chmod(0o600)
    monkeypatch.setenv("CLIENTS", "ann=of-ann")
    router = RouterSection(api_keys_env="CLIENTS", admin_keys_file=file)
    clients = (ApiKey("ann", "of-ann"),)
    operators = (ApiKey("eve", "of-eve", True), ApiKey(None, "of-anybody", True))
    assert credentials.router_keys(router) == (*clients, *operators)
    assert credentials.api_keys(router) == clients

    for text, words in {
        "": "admin_keys_file: no key in it",
        "a,a": "give each operator a key of its own",
        "x,eve=of-ann": "router.admin_keys_file: key 2 is also API key 1",
    }.items():
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)) as refused:
            credentials.api_keys(router)
        assert "of-ann" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"admin_keys_file is set too"):
        credentials.api_keys(RouterSection(admin_keys_env="CLIENTS", admin_keys_file=file))


def test_the_engines_key_comes_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INNER", " of-the-engines\n")
    assert credentials.engine_key("INNER") == "of-the-engines"
    monkeypatch.setenv("INNER", "two words")
    with pytest.raises(ConfigError, match="--engine-key-env: 'INNER' — this variable holds no key"):
        credentials.engine_key("INNER")


def test_tls_certificate_and_key_must_belong_together(tmp_path: Path) -> None:
    (cert, key), (_, other) = certificate(tmp_path, "one"), certificate(tmp_path, "two")
    locked = str(tmp_path / "locked.key")
    lock = ["openssl", "pkcs8", "-topk8", "-passout", "pass:x", "-in", key, "-out", locked]
    subprocess.run(lock, check=True, capture_output=True)
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    (tmp_path / "noise").chmod(0o600)
    noise = str(tmp_path / "noise")
    Path(cert).chmod(0o600)
    assert credentials.tls(RouterSection()) is None
    assert credentials.tls(router_with(cert, key)) == (Path(cert), Path(key))
    for files, line in [
        ((cert, None), f"router.tls_key_file: empty — router.tls_cert_file is '{cert}'; set both"),
        ((None, key), f"router.tls_cert_file: empty — router.tls_key_file is '{key}'; set both"),
        ((cert, other), f"router.tls_key_file: '{other}' — is not the key of router.tls_cert_file"),
        ((cert, locked), f"router.tls_key_file: '{locked}' — can't be used with '{cert}'"),
        ((key, key), f"router.tls_cert_file: '{key}' — holds no certificate; name a PEM file"),
        ((cert, cert), f"router.tls_key_file: '{cert}' — holds no private key; name a PEM file"),
        ((cert, noise), f"router.tls_key_file: '{noise}' — not text"),
        ((cert, "/none"), "router.tls_key_file: '/none' — No such file or directory; make it"),
    ]:
        with pytest.raises(ConfigError) as caught:
            credentials.tls(router_with(*files))
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o606])
def test_a_file_that_others_may_read_or_change_holds_no_secret(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    file.write_text("v" * 20)
    file.chmod(mode)
    with pytest.raises(
        ConfigError, match=r"transfer.secret_file: .* other users may read or change"
    ):
        credentials.secret(deployment_with(transfer={"secret_file": str(file)}))


def test_a_fifo_in_place_of_a_secret_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        credentials.secret(deployment_with(transfer={"secret_file": str(tmp_path / "secret")}))


def test_files_of_tiers_outlive_a_run_and_so_does_the_secret(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tiers = {"directory": {"path": str(tmp_path / "tier")}}
    lasting = {credentials.secret(deployment_with(tiers=tiers)) for _ in range(2)}
    assert len(lasting) == 1
    assert len({credentials.secret(deployment_with()) for _ in range(2)} | lasting) == 3


def router_with(cert: str | None, key: str | None) -> RouterSection:
    return RouterSection.model_validate({"tls_cert_file": cert, "tls_key_file": key})


def test_a_share_of_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEYS", "a=first,b=second")
    shares: dict[str, Any] = {"a": {"weight": 2}, "*": {"priority": 1}}
    section = RouterSection.model_validate({"api_keys_env": "KEYS", "shares": shares})
    assert len(credentials.router_keys(section)) == 2
    section = RouterSection.model_validate({"api_keys_env": "KEYS", "shares": {"c": {}}})
    with pytest.raises(
        ConfigError, match=r"router\.shares\.c: no key has this name \(keys: a, b\)"
    ):
        credentials.router_keys(section)
