"""Which shared memory the guardian of an engine removes."""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Iterator

import pytest

from disagg.engine import guardian


@pytest.fixture(params=["psm_{}", "{}-pp:0-[0-1]-cpushm_0", "{}-tp:0-[0-1-2-3]-cpushm_3"])
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a segment as Python's and vLLM's CPU ranks make them; it exists."""
    made = str(request.param).format(uuid.uuid4().int)
    (guardian.SHM / made).write_bytes(bytes(mmap.PAGESIZE))
    yield made
    (guardian.SHM / made).unlink(missing_ok=True)


def test_a_segment_goes_once_no_process_has_it(name: str) -> None:
    assert name in guardian._listing()
    with (guardian.SHM / name).open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert name in guardian._mapped(os.getpid())
        guardian._unlink({name})
        assert name in guardian._listing(), "it is in use"
    assert name not in guardian._mapped(os.getpid())
    guardian._unlink({name})
    assert name not in guardian._listing()


def test_what_is_not_of_vllm_stays() -> None:
    for other in ("plasma", "disagg-7-cpushm_x", "cpushm_0", "notes"):
        assert not guardian._is_segment(other)
