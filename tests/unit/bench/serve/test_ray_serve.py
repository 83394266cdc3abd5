"""What Ray Serve's router compares in place of token ids."""

from __future__ import annotations

from disagg.bench.serve.ray_serve import text


def test_each_token_is_one_character() -> None:
    ids = [*range(0xD700, 0xE100), 0, 1, 151_935]
    found = text(ids)
    assert len(found) == len(set(found)) == len(ids)
    assert found.encode().decode() == found, "no surrogates, which nothing could send"
    assert text(ids[:7]) == found[:7]
