"""An engine's events against what the engine holds, without an engine."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.caches.engine_caches import EngineCaches, Held
from disagg.router.caches.messages import Cleared, Event, Removed, Stored
from disagg.router.caches.picture import Picture

SIZE = 4
IDS = list(range(100, 141))  # ten blocks, and the token that is always computed
FULL = {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}


@pytest.fixture
def caches() -> EngineCaches:
    return EngineCaches()


@pytest.fixture
def picture(caches: EngineCaches) -> Picture:
    return caches.join("e")


def tell(picture: Picture, *events: Event) -> None:
    for event in events:
        for _ in picture.apply(event):
            pass


def stored(first: int, count: int, **more: Any) -> Stored:
    """Blocks of `IDS`. The engine's hash of a block is its number and 1000."""
    ids = IDS[first * SIZE : (first + count) * SIZE]
    hashes: list[int | bytes] = [1000 + number for number in range(first, first + count)]
    given = {"medium": "GPU", **FULL, **more}
    return Stored(hashes, 999 + first if first else None, ids, SIZE, **given)


def removed(*numbers: int, medium: str = "GPU") -> Removed:
    return Removed([1000 + number for number in numbers], medium, 0)


def held(caches: EngineCaches, salt: str | None = None, model: str = "m") -> Held:
    return caches.held(PromptBlocks(IDS, salt), model, "e")


def test_blocks_come_and_go(caches: EngineCaches, picture: Picture) -> None:
    assert held(caches) == Held()
    tell(picture, stored(0, 3), stored(3, 4))
    assert held(caches) == Held(28)
    tell(picture, removed(5))
    assert held(caches) == Held(20)
    tell(picture, removed(6), removed(4), stored(4, 1))
    assert (held(caches), len(picture)) == (Held(20), 5)
    tell(picture, Cleared())
    assert (held(caches), len(picture)) == (Held(), 0)
    assert not picture.ignored
    caches.leave("e")
    assert held(caches) == Held()


def test_a_block_has_as_many_copies_as_were_stored(caches: EngineCaches, picture: Picture) -> None:
    tell(picture, stored(0, 2), stored(0, 2), stored(0, 2), removed(0), removed(0))
    assert held(caches) == Held(8)
    tell(picture, removed(0))
    assert (held(caches), len(picture)) == (Held(), 1)


def test_media_below_the_gpu(caches: EngineCaches, picture: Picture) -> None:
    """As tiers tell it: the hash alone, whole, of a block that was stored before."""
    whole = [bytes(24) + (1000 + number).to_bytes(8, "big") for number in range(4)]
    tell(picture, stored(0, 4), Stored(list(whole), medium="CPU", group_idx=0))
    assert held(caches) == Held(16)
    tell(picture, removed(1, 2, 3))
    assert held(caches) == Held(4, below=12)
    assert len(picture) == 4, "they are children's parents still"
    tell(picture, Removed([whole[2]], "CPU", 0))
    assert held(caches) == Held(4, below=4)
    assert len(picture) == 3


@pytest.mark.parametrize(
    ("name", "keys", "salt", "model"),
    [
        (None, None, None, "m"),
        ("lora", [["lora"]] * 10, None, "lora"),
        ("lora", None, None, "lora"),
        (None, [["salt"], *[None] * 9], "salt", "m"),
        ("lora", [["lora", "salt"], *[["lora"]] * 9], "salt", "lora"),
    ],
)
def test_adapters_and_salts(
    caches: EngineCaches,
    picture: Picture,
    name: str | None,
    keys: Any,
    salt: str | None,
    model: str,
) -> None:
    tell(picture, stored(0, 10, lora_name=name, extra_keys=keys))
    assert held(caches, salt, model) == Held(40)
    assert held(caches, "other", model) == Held()
    if model == "lora":
        assert held(caches, salt) == Held()


def test_media_of_a_prompt_are_not_its_tokens(caches: EngineCaches, picture: Picture) -> None:
    images = [None, [["picture", 2]], None, None]
    tell(picture, stored(0, 4, extra_keys=images))
    assert held(caches) == Held(SIZE)


@pytest.mark.parametrize(
    ("event", "reason", "count"),
    [
        (stored(2, 3), "unknown_parent", 3),
        (removed(7), "unknown_block", 1),
        (Stored([5, 6], medium="CPU"), "unknown_block", 2),
        (Stored([1, 2], None, [1, 2, 3], 4), "malformed", 2),
        (Stored([1], None, [1, 2, 3, -4], 4), "malformed", 1),
        (Stored([1], None, [1], -1), "malformed", 1),
        (Stored([1], None, [1], 0), "malformed", 1),
        (Stored([1], None, list(range(1 << 17)), 1 << 17), "malformed", 1),
        (Stored([1, 2], None, [1, 2], 1, extra_keys=[None]), "malformed", 2),
        (stored(0, 1, group_idx=1, kv_cache_spec_kind="sliding_window"), "other_group", 1),
        (stored(0, 1, group_idx=1, kv_cache_spec_kind=None), "other_group", 1),
    ],
)
def test_what_does_not_fit_is_counted(
    caches: EngineCaches, picture: Picture, event: Event, reason: str, count: int
) -> None:
    tell(picture, event)
    assert picture.ignored == {reason: count}
    assert len(picture) == len(caches.index) == 0
    tell(picture, stored(0, 10))
    assert caches.index.depths([], 0) == ([], [])


def test_one_group_of_full_attention_is_followed(caches: EngineCaches, picture: Picture) -> None:
    window = {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    second = {"group_idx": 2, "kv_cache_spec_kind": "full_attention"}
    tell(picture, stored(0, 4, **window), stored(0, 4, group_idx=1), stored(0, 6, **second))
    assert held(caches) == Held(16)
    tell(picture, Removed([1003], "GPU", 0), Removed([1002], "GPU", 2))
    assert held(caches) == Held(16)
    tell(picture, Removed([1003], "GPU", 1))
    assert held(caches) == Held(12)


def test_other_block_sizes_are_left_out(caches: EngineCaches, picture: Picture) -> None:
    tell(picture, stored(0, 2), Stored([7], None, IDS[:2], 2, "GPU", group_idx=0))
    assert picture.ignored == {"other_size": 1}
    assert held(caches) == Held(8)


def test_an_engine_has_only_so_many_blocks(caches: EngineCaches) -> None:
    caches.join("e").close()
    picture = caches.pictures["e"] = Picture(caches.index, most_blocks=3)
    tell(picture, stored(0, 5))
    assert (len(picture), picture.ignored) == (3, {"too_many": 2})
    tell(picture, removed(0), stored(0, 1))
    assert held(caches) == Held(12)


def test_one_hash_of_two_blocks(caches: EngineCaches, picture: Picture) -> None:
    tell(picture, stored(0, 2), Stored([1000], None, [9] * SIZE, SIZE, "GPU", group_idx=0))
    assert picture.ignored == {"malformed": 1}
    assert held(caches) == Held(8)
