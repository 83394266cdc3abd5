"""Keeps enough file descriptors free for what was admitted.

Without any left, the kernel resets clients' connections, and connections to engines fail as if the
engines had. So new connections take the place of idle ones, and what has no room gets status 503
early. Counting costs a system call for each descriptor. So between two counts the number in use is
taken to be the highest that is possible.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import time
from typing import Protocol

from disagg.router.api.errors import ApiError
from disagg.safe_logging import LimitedLog

logger = logging.getLogger(__name__)
_OPEN = "/dev/fd"
_MOST = 1 << 20  # where there is no hard limit
_PER_REQUEST = 2  # a connection to a prefill engine, one to a decode engine
_LEAST_RESERVE, _RESERVE_SHARE = 16, 16
_COUNT_SHARE = 20  # counting takes at most this part of the time
_LEAST_PAUSE_S = 0.02
RETRY_S = 1


class IdleConnection(Protocol):
    """A client's connection without a request."""

    def give_way(self) -> None:
        """Close it."""


def raise_limit() -> None:
    """Raise this process's soft limit of file descriptors to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class FileDescriptors:
    """The file descriptors of this process.

    The last `reserve` are for what cannot wait, as many before them for requests that run.
    """

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.limit = _MOST if soft == resource.RLIM_INFINITY else soft
        self.reserve = max(_LEAST_RESERVE, self.limit // _RESERVE_SHARE)
        self.idle: dict[IdleConnection, None] = {}
        """Clients' connections without a request; the one that was idle for longest is the first.
        """
        self._used = 0
        self._count_again_at = 0.0
        self._log = LimitedLog(logger, lines=1)
        self._count()

    def take_connection(self) -> bool:
        """A client has connected: whether there is room, at the cost of an idle one if need be."""
        self._used += 1
        if self._used <= self.limit - 2 * self.reserve or self._has_room(2 * self.reserve):
            return True
        return self._make_room(1, "a new connection gets status 503")

    def connection_closed(self) -> None:
        """A client's connection is closed."""
        self._used -= 1

    def is_exhausted(self) -> bool:
        """Whether even the reserve is nearly used up."""
        return not self._has_room(self.reserve // 2)

    def take_request(self) -> None:
        """A request goes to engines: `ApiError` 503 if there is no room for their connections."""
        self._used += _PER_REQUEST
        if self._used <= self.limit - self.reserve or self._has_room(self.reserve):
            return
        if not self._make_room(_PER_REQUEST, "a request gets status 503"):
            raise no_descriptors()

    def _has_room(self, reserve: int) -> bool:
        if self._used > self.limit - reserve and time.monotonic() >= self._count_again_at:
            self._count()
        return self._used <= self.limit - reserve

    def _make_room(self, count: int, else_what: str) -> bool:
        """Close as many idle connections; if there are fewer, none is closed."""
        if len(self.idle) < count:
            self._log.warning(
                "%d of %d file descriptors are in use, so %s; raise the hard limit (ulimit -Hn)",
                self._used,
                self.limit,
                else_what,
            )
            return False
        for _ in range(count):
            connection = next(iter(self.idle))
            del self.idle[connection]
            connection.give_way()
        return True

    def _count(self) -> None:
        began = time.monotonic()
        try:
            self._used = len(os.listdir(_OPEN))
        except OSError as error:
            # Not one is left to read the folder; or there is no such folder, and nothing to count.
            self._used = self.limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
        now = time.monotonic()
        self._count_again_at = now + max(_LEAST_PAUSE_S, _COUNT_SHARE * (now - began))


def no_descriptors() -> ApiError:
    """The error for what has no room."""
    return ApiError(
        503, "the router is short of file descriptors; try again", {"Retry-After": str(RETRY_S)}
    )
