"""The host pool's memory."""

from __future__ import annotations

import ctypes

import pytest

from disagg.store.host_pool import HostPool

SLOT = 3 * 4096 + 8


def test_slots_are_apart_and_where_the_address_says() -> None:
    pool = HostPool(5, SLOT)
    for number in range(5):
        pool.slot(number)[:] = bytes([number + 1]) * SLOT
    for number in range(5):
        there = ctypes.string_at(pool.address + number * SLOT, SLOT)
        assert there == bytes([number + 1]) * SLOT == bytes(pool.slot(number))
    pool.close()


def test_touching_pages_changes_no_byte() -> None:
    pool = HostPool(16, 1 << 20)
    pool.slot(15)[:] = b"\x07" * (1 << 20)
    assert pool.wait_until_touched(30)
    assert bytes(pool.slot(15)) == b"\x07" * (1 << 20)
    assert not any(pool.slot(14))
    pool.close()


def test_closing_does_not_pull_memory_from_under_a_reader() -> None:
    pool = HostPool(2, SLOT)
    view = pool.slot(1)
    view[:] = b"\x05" * SLOT
    pool.close()
    assert bytes(view) == b"\x05" * SLOT
    with pytest.raises(ValueError, match="released"):
        pool.slot(0)


def test_memory_is_registered_once_and_given_back() -> None:
    calls: list[object] = []

    def pin(address: int, num_bytes: int) -> object:
        calls.append((address, num_bytes))
        return lambda: calls.append("undone")

    pool = HostPool(2, SLOT, pin)  # type: ignore[arg-type]
    assert calls == [(pool.address, 2 * SLOT)]
    assert pool.wait_until_touched(0)
    pool.close()
    pool.close()
    assert calls[1:] == ["undone"]


def test_what_is_no_slot() -> None:
    pool = HostPool(2, SLOT)
    for number in (-1, 2):
        with pytest.raises(IndexError, match="of 2"):
            pool.slot(number)
    pool.close()
    with pytest.raises(ValueError, match="no pool"):
        HostPool(0, SLOT)
