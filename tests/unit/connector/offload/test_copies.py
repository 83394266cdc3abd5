"""The copies of one load: all of them, and none after its end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from disagg.connector.offload import worker

SIZE = 1 << 12


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("at_once", [1, 3 * SIZE, 100 * SIZE])
def test_everything_is_copied(monkeypatch: pytest.MonkeyPatch, count: int, at_once: int) -> None:
    monkeypatch.setattr(worker, "_COPY_BYTES", at_once)
    source = np.random.default_rng(1).integers(0, 256, (count, SIZE), dtype=np.uint8)
    target = np.zeros_like(source)
    with ThreadPoolExecutor(2) as pool:
        copies = worker._Copies(pool)
        for to, data in zip(target, source, strict=True):
            copies.pairs.append((to, data))
            copies.added(SIZE)
        assert copies.end() == ""
    assert copies.num_bytes == count * SIZE
    assert np.array_equal(target, source)


def test_a_copy_that_fails_is_said_and_the_others_are_waited_for() -> None:
    source = np.ones((2, SIZE), np.uint8)
    target = np.zeros_like(source)
    with ThreadPoolExecutor(2) as pool:
        copies = worker._Copies(pool)
        copies.pairs.append((target[0], source[0, :7]))
        copies.begin()
        copies.pairs.append((target[1], source[1]))
        assert copies.end() == "RuntimeError"
    assert not target[0].any()
    assert target[1].all()
