"""What a source of engines is, and help for those that look again and again.

A source reports all engines that it knows, each time they change. It must never report fewer
because it could not look: what it cannot see stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, TypeVar

from disagg.config import Role
from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

T = TypeVar("T")
Report: TypeAlias = Callable[[Sequence[EngineEndpoint]], None]
"""Takes all engines of a source. Their names are of no meaning: the registry gives them."""


class Source(Protocol):
    """Finds engines. `name`: for people. `roles`: those of which it is expected to find engines."""

    name: str
    roles: frozenset[Role]

    async def run(self, report: Report) -> None:
        """Report the engines whenever they change, for ever."""


class SaidOnce:
    """Warns of a problem once, until it is another one or over."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: str | None = None

    def problem(self, words: str) -> None:
        """It cannot look just now; what is known stays."""
        if words != self._said:
            self._said = words
            logger.warning("%s: %s; the known engines stay", self._name, words)

    def over(self) -> None:
        """It could look."""
        if self._said is not None:
            self._said = None
            logger.warning("%s: works again", self._name)


async def in_thread(work: Callable[[], T]) -> T:
    """The result of blocking work. Its thread never keeps the process from ending, as those of an
    executor do: a look-up or a network file system may hang for minutes."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 (raised again where it is awaited)
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done
