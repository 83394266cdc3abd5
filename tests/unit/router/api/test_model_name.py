"""Names in JSON bodies, forms and queries; bodies that name none."""

from __future__ import annotations

import tracemalloc

import pytest

from disagg.router.api import model_name

JSON = "application/json"
FORM = 'multipart/form-data; boundary="a b"'


def part(head: bytes, value: bytes) -> bytes:
    return b"--a b\r\n" + head + b"\r\n\r\n" + value + b"\r\n"


FIELD = b'Content-Disposition: form-data; name="model"'
FILE = b'Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav'


@pytest.mark.parametrize(
    ("data", "content_type", "query", "name"),
    [
        (b'{"input": "x", "model": "a"}', JSON, b"", "a"),
        (b'{"model": "a"}', "", b"", "a"),  # engines read JSON without its type too
        (b'{"model": "a"}', JSON, b"model=b", "a"),  # the engine reads the body
        (b'{"model": "\\u0061"}', JSON, b"", "a"),
        (b'{"input": {"model": "a"}}', JSON, b"", None),
        (b'{"input": "x"}', JSON, b"x=1&model=org%2Fb", "org/b"),
        (b'{"model": null}', JSON, b"model=b", "b"),
        (b'{"model": 5}', JSON, b"", None),
        (b'{"model": ["a"]}', JSON, b"", None),
        (b"[]", JSON, b"", None),
        (b"\xff\xfe{", JSON, b"", None),
        (b"[" * 100_000, JSON, b"", None),
        (b"", "", b"model=a+b", "a b"),
        (b"", "", b"model", None),
        (part(FILE, b"x") + part(FIELD, b"a") + b"--a b--\r\n", FORM, b"", "a"),
        (part(FILE, FIELD + b"\r\n\r\nno") + part(FIELD, b"a") + b"--a b--\r\n", FORM, b"", "a"),
        (part(FIELD.replace(b'"', b""), b"a") + b"--a b--\r\n", FORM, b"", "a"),
        (part(FIELD.lower(), b"a") + b"--a b--\r\n", FORM, b"", "a"),
        (part(FILE, b"x") + b"--a b--\r\n", FORM, b"", None),
        (part(FIELD, b"a"), "multipart/form-data", b"", None),
    ],
)
def test_the_name(data: bytes, content_type: str, query: bytes, name: str | None) -> None:
    assert model_name.named(data, content_type, query) == name


def test_the_adapter() -> None:
    assert model_name.adapter(b'{"lora_name": "a", "lora_path": "/p"}') == "a"
    assert model_name.adapter(b"{}") is None


def test_what_does_not_count_is_not_decoded() -> None:
    huge = b"[" + b"1.5," * (1 << 20) + b"1]"
    bodies = [b'{"model": %b}' % huge, b'{"input": %b, "model": "a"}' % huge]
    tracemalloc.start()
    try:
        names = [model_name.named(body, JSON, b"") for body in bodies]
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert names == [None, "a"]
