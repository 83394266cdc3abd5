from __future__ import annotations

import random

import pytest

from disagg.checksums import DIGEST_BYTES, Checksum

SECRET = b"the secret of these tests"
KEYED, FAST = Checksum.named("keyed", b"purpose", SECRET), Checksum.named("fast", b"", b"")


@pytest.mark.parametrize("checksum", [KEYED, FAST], ids=["keyed", "fast"])
def test_however_the_bytes_are_split(checksum: Checksum) -> None:
    content = random.Random(1).randbytes(100_000)
    whole = checksum.of(content)
    assert len(whole) == DIGEST_BYTES
    assert whole == checksum.of(content[:7], content[7:7], memoryview(content)[7:])
    assert whole != checksum.of(content[1:])


def test_a_key_serves_one_secret_and_one_purpose() -> None:
    others = [
        Checksum.named("keyed", b"other", SECRET),
        Checksum.named("keyed", b"purpose", SECRET + b"x"),
        FAST,
    ]
    assert Checksum.named("keyed", b"purpose", SECRET) == KEYED
    assert len({each.of(b"content") for each in (KEYED, *others)}) == 4
    assert len({each.kind for each in (KEYED, *others)}) == 4


def test_neither_name_nor_repr_reveals_the_key() -> None:
    assert KEYED.key is not None
    for text in (repr(KEYED), KEYED.kind):
        assert KEYED.key.hex()[:8] not in text
        assert repr(KEYED.key)[2:10] not in text
