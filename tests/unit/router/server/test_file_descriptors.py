"""Who gets a file descriptor when few are left. `test_process.py` has real processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from disagg.router.api.errors import ApiError
from disagg.router.server.file_descriptors import FileDescriptors


class Idle:
    def __init__(self) -> None:
        self.is_closed = False

    def give_way(self) -> None:
        self.is_closed = True


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """Descriptors of the test, which it may close."""
    found: list[int] = []
    yield found
    for one in found:
        os.close(one)


def with_free(count: int) -> FileDescriptors:
    """As if so many were free before the reserves."""
    made = FileDescriptors()
    made.reserve = 16
    made.limit = len(os.listdir("/dev/fd")) + 2 * made.reserve + count
    return made


def test_what_is_open_is_counted_again(opened: list[int]) -> None:
    descriptors = with_free(10)
    descriptors._count_again_at = float("inf")
    assert [descriptors.take_connection() for _ in range(11)] == [True] * 10 + [False]
    descriptors._count_again_at = 0.0  # none was really taken, so that counting again finds room
    assert descriptors.take_connection()
    opened += [os.open("/dev/null", os.O_RDONLY) for _ in range(12)]
    descriptors._count()
    assert not descriptors.take_connection()
    for one in opened[:8]:
        os.close(one)
    del opened[:8]
    descriptors._count()
    assert descriptors.take_connection()


def test_the_connection_that_was_idle_for_longest_gives_way() -> None:
    descriptors = with_free(0)
    descriptors._count_again_at = float("inf")
    idle = [Idle() for _ in range(4)]
    descriptors.idle = dict.fromkeys(idle)
    descriptors._used = descriptors.limit
    assert descriptors.take_connection()
    assert [one.is_closed for one in idle] == [True, False, False, False]
    descriptors.take_request()
    assert [one.is_closed for one in idle] == [True, True, True, False]
    with pytest.raises(ApiError) as refused:  # one is too few for a request, and stays
        descriptors.take_request()
    assert (refused.value.status, idle[3].is_closed) == (503, False)
    assert descriptors.take_connection()
    assert not descriptors.take_connection()


def test_requests_may_use_more_than_new_connections() -> None:
    descriptors = with_free(0)
    descriptors._count_again_at = float("inf")
    assert not descriptors.take_connection()
    assert not descriptors.is_exhausted()
    descriptors.take_request()
    descriptors._used = descriptors.limit
    assert descriptors.is_exhausted()


def test_without_a_folder_of_descriptors_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("disagg.router.server.file_descriptors._OPEN", "/nowhere")
    for pause in ("_LEAST_PAUSE_S", "_COUNT_SHARE"):
        monkeypatch.setattr(f"disagg.router.server.file_descriptors.{pause}", 0)
    descriptors = FileDescriptors()
    descriptors.limit, descriptors.reserve = 100, 16
    assert all(descriptors.take_connection() for _ in range(1000))
