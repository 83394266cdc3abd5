"""Keys of a prompt's blocks, by the compiled module and without it."""

from __future__ import annotations

import random
import shutil
import struct
from array import array

import pytest

from disagg.router.caches import block_keys
from disagg.router.caches.block_keys import PromptBlocks


@pytest.fixture(autouse=True, params=["native", "python"])
def _by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(block_keys, "_pack", block_keys._packed)
        monkeypatch.setattr(block_keys, "chain", block_keys._chain)
    elif not block_keys.is_compiled:
        pytest.skip("no compiled module")


def keys(
    ids: list[int], size: int = 16, adapter: str | None = None, salt: str | None = None
) -> list[int]:
    return [key for some in PromptBlocks(ids, salt).keys(size, adapter) for key in some]


def test_equal_prefixes_have_equal_keys() -> None:
    generator = random.Random(1)
    ids = [generator.randrange(1 << 18) for _ in range(3000)]
    whole = keys(ids)
    assert len(whole) == len(set(whole)) == 2999 // 16
    assert keys(ids[:1601]) == whole[:100]
    changed = [*ids[:800], ids[800] ^ 1, *ids[801:]]
    assert keys(changed)[:50] == whole[:50]
    assert not set(keys(changed)[50:]) & set(whole), "what follows a block depends on it"


@pytest.mark.parametrize(
    ("length", "size", "count"), [(0, 16, 0), (1, 1, 0), (16, 16, 0), (17, 16, 1), (33, 16, 2)]
)
def test_the_last_token_is_computed(length: int, size: int, count: int) -> None:
    blocks = PromptBlocks(list(range(length)))
    assert blocks.count(size) == count
    assert [len(some) for some in blocks.keys(size)] == [count] * bool(count)


def test_what_changes_the_cache_changes_all_keys() -> None:
    ids = list(range(1000))
    kinds = [keys(ids), keys(ids, 32), keys(ids, adapter="a"), keys(ids, salt="a")]
    kinds += [keys(ids, adapter="b"), keys(ids, salt="b"), keys(ids, adapter="a", salt="a")]
    each = [set(kind) for kind in kinds]
    assert len(set.union(*each)) == sum(map(len, each))


def test_keys_are_worked_out_as_far_as_asked_and_kept() -> None:
    blocks = PromptBlocks(list(range(16_001)))
    first = next(blocks.keys(16))
    assert len(first) < 1000
    again = [key for some in blocks.keys(16) for key in some]
    assert len(again) == 1000
    assert again[: len(first)] == first
    assert [key for some in blocks.keys(16) for key in some] == again


@pytest.mark.parametrize("ids", [[-1], [1 << 32], ["1"], [1.5], [None], [[1]], "1"])
def test_what_is_no_token_id_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"."):
        PromptBlocks(ids)


def test_what_is_no_list_is_packed_too() -> None:
    ids = [0, 7, (1 << 32) - 1]
    assert {block_keys.packed(kind) for kind in (ids, tuple(ids), array("I", ids))} == {
        struct.pack("3I", *ids)
    }


def test_the_compiled_module_is_there_where_a_compiler_was() -> None:
    assert block_keys.is_compiled or shutil.which("cc") is None, "make install builds it"


@pytest.mark.parametrize(("adapter", "salt"), [(None, None), ("a", None), (None, "s"), ("a", "s")])
def test_a_key_depends_on_the_block_the_one_before_and_the_extra_keys(
    adapter: str | None, salt: str | None
) -> None:
    ids = list(range(5000))
    parent, expected = block_keys.root(16), []
    for at in range(0, 4999 // 16 * 16, 16):
        extra = block_keys.extra_bytes(adapter, [salt] if salt and at == 0 else [])
        (parent,) = block_keys.chain(block_keys.packed(ids[at : at + 16]), 64, parent, [extra])
        expected.append(parent)
    assert keys(ids, adapter=adapter, salt=salt) == expected


@pytest.mark.parametrize("bytes_each", [8, 16, 20, 64])
def test_each_bit_counts(bytes_each: int) -> None:
    """A key has about half of its bits changed by any bit of its block or of the key before it."""
    generator = random.Random(bytes_each)
    for _ in range(20):
        block, parent = generator.randbytes(bytes_each), generator.getrandbits(64)
        (key,) = block_keys.chain(block, bytes_each, parent)
        for bit in range(bytes_each * 8):
            other = (int.from_bytes(block, "little") ^ 1 << bit).to_bytes(bytes_each, "little")
            (changed,) = block_keys.chain(other, bytes_each, parent)
            assert 10 <= (key ^ changed).bit_count() <= 54
        for bit in range(64):
            (changed,) = block_keys.chain(block, bytes_each, parent ^ 1 << bit)
            assert 10 <= (key ^ changed).bit_count() <= 54


def test_blocks_that_are_much_alike_share_no_key() -> None:
    """Few small ids in all orders, and blocks of one id; no two of 200,000. After a small key,
    which says little."""
    generator = random.Random(3)
    blocks = {struct.pack("16I", *generator.choices(range(3), k=16)) for _ in range(100_000)}
    blocks |= {struct.pack("I", number) * 16 for number in range(100_000)}
    data = b"".join(blocks)
    each = [block_keys.chain(data[at : at + 64], 64, 7)[0] for at in range(0, len(data), 64)]
    assert len(set(each)) == len(blocks) > 190_000
