"""The count of a body's values, before the body is parsed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disagg.router.api import bodies
from disagg.router.api.errors import ApiError

PIECES = st.lists(st.sampled_from(["\\", '"', ",", "[", "{", "a", "ä"]), max_size=40).map("".join)
VALUES = st.recursive(
    PIECES | st.integers(0, 9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PIECES, inner, max_size=4),
)


def counts(value: Any) -> tuple[int, int]:
    """Commas; strings, arrays and objects."""
    if isinstance(value, str):
        return 0, 1
    if isinstance(value, dict | list):
        inner = [counts(one) for one in (value.values() if isinstance(value, dict) else value)]
        keys = len(value) if isinstance(value, dict) else 0
        commas = max(0, len(value) - 1) + sum(one for one, _ in inner)
        return commas, 1 + keys + sum(other for _, other in inner)
    return 0, 0


def is_allowed(data: bytes, most: int) -> bool:
    try:
        asyncio.run(bodies.check_elements(data, most))
    except ApiError as error:
        return error.status != 413
    return True


@pytest.mark.parametrize("piece", [1, 2, 3, 7])
def test_what_is_in_strings_does_not_count(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    monkeypatch.setattr(bodies, "UNCOUNTED", 0)
    monkeypatch.setattr(bodies, "_COUNTED_AT_ONCE", piece)

    @settings(max_examples=200, deadline=None)
    @given(VALUES)
    def check(value: Any) -> None:
        data = json.dumps(value).encode()
        commas, objects = counts(value)
        need = max(commas, 10 * objects)
        assert is_allowed(data, need)
        assert not need or not is_allowed(data, need - 1)

    check()


def test_broken_json_is_counted_too() -> None:
    size = 1 << 20
    assert not is_allowed(b"[" * size, 1000)
    assert not is_allowed(b'"",' * size, 1000)
    assert is_allowed(b'"' + b"[{," * size, 1000), "the parser refuses it at once"
    assert is_allowed(b"\\" * size + b'"' + b"," * size, size)
