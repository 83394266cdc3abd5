"""URLs of object stores: what they say, and what they must not contain."""

from __future__ import annotations

import pytest

from disagg.object_urls import ObjectUrl, parse_object_url


@pytest.mark.parametrize(
    ("text", "url", "shown"),
    [
        ("s3://bucket", ObjectUrl("s3", "bucket", ""), "s3://bucket"),
        ("s3://my.bucket/a/b/", ObjectUrl("s3", "my.bucket", "a/b"), "s3://my.bucket/a/b"),
        (
            "valkey://host",
            ObjectUrl("valkey", "host", "disagg-kv", 6379, 0, False),
            "valkey://host:6379/0/disagg-kv",
        ),
        (
            "redis://host:7000/3",
            ObjectUrl("valkey", "host", "disagg-kv", 7000, 3, False),
            "valkey://host:7000/3/disagg-kv",
        ),
        (
            "rediss://[::1]:7000/3/mine",
            ObjectUrl("valkey", "::1", "mine", 7000, 3, True),
            "valkeys://[::1]:7000/3/mine",
        ),
        (
            "valkeys://host/1/x/y",
            ObjectUrl("valkey", "host", "x/y", 6379, 1, True),
            "valkeys://host:6379/1/x/y",
        ),
        (
            "mooncake://master",
            ObjectUrl("mooncake", "master", "disagg-kv", 50051, tls=False),
            "mooncake://master:50051/disagg-kv",
        ),
        (
            "mooncake://10.0.0.1:7000/a/b",
            ObjectUrl("mooncake", "10.0.0.1", "a/b", 7000, tls=False),
            "mooncake://10.0.0.1:7000/a/b",
        ),
    ],
)
def test_what_a_url_says(text: str, url: ObjectUrl, shown: str) -> None:
    assert parse_object_url(text) == url
    assert str(url) == shown
    assert parse_object_url(shown) == url


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "begins with none"),
        ("http://host/secret", "begins with none"),
        ("redis://user:secret@host", "has a user or a password"),
        ("s3://key:secret@bucket", "has a user or a password"),
        ("redis://:sec/ret@host", "is no URL"),
        ("redis://host:secret", "is no URL"),
        ("redis://host/0?password=secret", "has parameters"),
        ("redis://host/0#secret", "has parameters"),
        ("redis://host/secret", "no number of a database"),
        ("redis://host/-1", "no number of a database"),
        ("redis:///0", "names no host"),
        ("mooncake:///secret", "names no host"),
        ("mooncake://user:secret@host", "has a user or a password"),
        ("s3:///secret", "names no bucket"),
        ("s3://Secret_Bucket", "names no bucket"),
        ("s3://bucket:80/secret", "names no bucket"),
        ("s3://bucket/sec ret", "has a prefix"),
        ("s3://bucket/a/../secret", "has a prefix"),
        ("s3://bucket/a//secret", "has a prefix"),
        ("redis://host/0/sec*ret", "has a prefix"),
    ],
)
def test_what_is_refused_is_not_repeated(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_object_url(text)
    assert "ret" not in str(caught.value).lower()
