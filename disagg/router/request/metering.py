"""What an answer tells a client about its limits, and how many tokens the answer has.

Only for clients with shares. Tokens are the engine's own count, if the answer has it; else the
events of the stream, each of which has a token at least.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from starlette.types import Message, Send

from disagg.router.api.event_parser import END
from disagg.router.pairing.rate_limits import Fields

_USAGE = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,12})')
_KEPT = 1024  # bytes of the end, where the usage is


class Metering:
    """One answer. `fields`: that its head gets as well. `counted`: called with its tokens at the
    end."""

    def __init__(self, fields: Fields, counted: Callable[[int], None]) -> None:
        self._fields, self._counted = fields, counted
        self._events = 0
        self._end = b""

    def wrap(self, send: Send) -> Send:
        """The same, and counts what is sent."""

        # A plain function: a coroutine more would cost each message as much as the counting.
        def sending(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._fields]}
            else:
                self._count(message.get("body", b""))
            return send(message)

        return sending

    def finish(self) -> None:
        """The answer has ended in whatever way."""
        reported = [int(number) for number in _USAGE.findall(self._end)]
        self._counted(max([self._events, *reported]))

    def _count(self, data: bytes) -> None:
        self._events += data.count(END)  # JSON has no line ends in its strings
        self._end = (self._end + data)[-_KEPT:]
