"""From settings to a store: credentials, files and packages; no message shows a secret."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from object_servers import BUCKET, S3Server, Server, running_valkey

from disagg.errors import ConfigError
from disagg.store.objects.base import StoreError
from disagg.store.objects.open import ObjectOptions, open_store, space_of
from disagg.testing.waiting import eventually


def credentials(folder: Path, *lines: str) -> Path:
    file = folder / "credentials"
    file.write_text("\n".join(lines))
    file.chmod(0o600)
    return file


def test_valkey_with_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the environment, or from a file, which is preferred."""
    with running_valkey(tmp_path / "log", "--requirepass", "hunter2") as server:

        def reason(file: Path | None = None) -> str:
            store = open_store(ObjectOptions(server.url, credentials_file=file))
            try:
                store.sizes(["a"])
            except StoreError as error:
                return "shown" if "hunter2" in str(error) else error.reason
            finally:
                store.close()
            return ""

        assert reason() == "denied"
        monkeypatch.setenv("VALKEY_PASSWORD", "hunter2")
        assert reason() == ""
        monkeypatch.setenv("VALKEY_PASSWORD", "wrong")
        assert reason() == "denied"
        assert reason(credentials(tmp_path, "# of tests", "", "VALKEY_PASSWORD = hunter2")) == ""


def test_s3_with_keys(s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(s3_server, S3Server)
    options: dict[str, Any] = {"endpoint": s3_server.endpoint, "region": "us-east-1"}
    file = credentials(tmp_path, "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b=")
    url = f"s3://{BUCKET}/open"
    for chosen in (file, None):
        store = open_store(ObjectOptions(url, credentials_file=chosen, **options))
        store.put("a", [memoryview(b"123")])
        assert store.sizes(["a", "b"]) == [3, None]
        store.close()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


@pytest.mark.parametrize(
    "line", ["hunter2", "PASSWORD=hunter2", "AWS_ACCESS_KEY_ID=hunter2", "VALKEY_PASSWORD="]
)
def test_a_wrong_line_is_named_and_not_shown(tmp_path: Path, line: str) -> None:
    file = credentials(tmp_path, "# comment", line)
    with pytest.raises(ConfigError, match="line 2 is none of VALKEY_USERNAME") as caught:
        open_store(ObjectOptions("valkey://host", credentials_file=file))
    assert "hunter2" not in str(caught.value)


def test_what_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def problem(url: str = "valkey://host", **more: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            open_store(ObjectOptions(url, **more))
        (line,) = caught.value.problems
        assert "hunter2" not in line
        return line

    assert problem("valkey://:hunter2@host").startswith("tiers.objects.url: has a user")
    open_file = credentials(tmp_path, "VALKEY_PASSWORD=hunter2")
    open_file.chmod(0o640)
    assert "mode 600" in problem(credentials_file=open_file)
    assert "No such file" in problem(credentials_file=tmp_path / "none")
    assert problem("valkeys://host", ca_file=tmp_path / "none").startswith("tiers.objects.ca_file")
    assert problem("valkeys://host", ca_file=open_file).startswith("tiers.objects.ca_file")
    assert problem("s3://bucket", ca_file=tmp_path / "none").startswith("tiers.objects.ca_file")
    monkeypatch.setenv("VALKEY_USERNAME", "kv")
    assert "VALKEY_PASSWORD is not; set both" in problem()
    monkeypatch.setitem(sys.modules, "obstore", None)
    assert problem("s3://bucket") == (
        "tiers.objects.url: s3 — obstore is not installed here; pip install 'disagg[s3]'"
    )
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert "Debian's libibverbs1" in problem("mooncake://master")


def test_only_what_has_no_limit_of_its_own_is_swept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_valkey(tmp_path / "log") as server:
        options = ObjectOptions(server.url)
        store = open_store(options)
        assert space_of(options, store) is None
        assert eventually(lambda: "maxmemory is not set" in caplog.text)
        store.close()
    options = ObjectOptions("s3://bucket", region="x")
    store = open_store(options)
    space = space_of(options, store)
    assert space is not None
    space.close()
    store.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "valkey://h", "max_bytes": 5}, "tiers.objects.max_bytes: Valkey limits"),
        ({"url": "valkey://h", "region": "x"}, "tiers.objects.region: only S3"),
        ({"url": "redis://h", "endpoint": "http://h"}, "tiers.objects.endpoint: only S3"),
        ({"url": "mooncake://h", "ttl_s": 5.0}, "tiers.objects.ttl_s: Mooncake evicts"),
        ({"url": "mooncake://h", "max_bytes": 5}, "tiers.objects.max_bytes: the memory that"),
        ({"url": "mooncake://h", "ca_file": Path("x")}, "tiers.objects.ca_file: Mooncake knows"),
        ({"url": "s3://bucket", "endpoint": "h:9"}, "tiers.objects.endpoint: is no address"),
        ({"url": "s3://bucket", "endpoint": "http://u:p@h"}, "tiers.objects.endpoint: is no"),
    ],
)
def test_what_a_store_does_not_take_is_refused_without_a_yaml_too(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_store(ObjectOptions(**options))
