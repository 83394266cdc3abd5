"""Answers have the bytes that uvicorn's own cycle would send, and end as they would there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from disagg.router.server.cycle import Cycle

Headers = Sequence[tuple[bytes, bytes]]
FIELDS: Sequence[Headers] = (
    [],
    [(b"content-length", b"5")],
    [(b"content-length", b"4")],
    [(b"content-length", b"6")],
    [(b"transfer-encoding", b"chunked")],
    [(b"content-length", b"4"), (b"transfer-encoding", b"Chunked")],
    [(b"transfer-encoding", b"chunked"), (b"content-length", b"5")],
    [(b"connection", b"close")],
    [(b"connection", b"Keep-Alive, Close"), (b"content-length", b"5")],
    [(b"connection", b"keep-alive"), (b"x-a", b"1"), (b"x-a", b"2")],
)
BODIES: Sequence[Sequence[bytes]] = ([b"hello"], [b"hel", b"lo"], [b"hello", b""], [b""])


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.is_closed = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += bytes(data)

    def close(self) -> None:
        self.is_closed = True


def answered(
    kind: type[RequestResponseCycle], messages: Sequence[Any], method: str, keeps: bool
) -> tuple[bytes, bool, bool, int]:
    """What the client gets, whether the connection is closed, whether the answer is complete, and
    the number of the message that was refused."""
    return asyncio.run(_answered(kind, messages, method, keeps))


async def _answered(
    kind: type[RequestResponseCycle], messages: Sequence[Any], method: str, keeps: bool
) -> tuple[bytes, bool, bool, int]:
    transport = Transport()
    logger = logging.getLogger(__name__)
    cycle = kind(
        scope=cast(Any, {"method": method}),
        transport=transport,
        flow=FlowControl(transport),
        logger=logger,
        access_logger=logger,
        access_log=False,
        default_headers=[(b"vary", b"Origin")],
        message_event=asyncio.Event(),
        expect_100_continue=False,
        keep_alive=keeps,
        on_response=lambda: None,
    )
    for number, message in enumerate(messages):
        try:
            await cycle.send(message)
        except RuntimeError:
            return transport.sent, transport.is_closed, cycle.response_complete, number
    return transport.sent, transport.is_closed, cycle.response_complete, -1


def start(status: int, headers: Headers) -> Any:
    return {"type": "http.response.start", "status": status, "headers": headers}


def body(data: bytes, *, more: bool = False) -> Any:
    return {"type": "http.response.body", "body": data, "more_body": more}


@pytest.mark.parametrize("method", ["POST", "HEAD"])
@pytest.mark.parametrize("keeps", [True, False])
def test_the_bytes_of_answers(method: str, keeps: bool) -> None:
    for status, headers, pieces in itertools.product((200, 204, 429), FIELDS, BODIES):
        messages = [
            start(status, headers),
            *(body(piece, more=True) for piece in pieces[:-1]),
            body(pieces[-1]),
        ]
        ours = answered(Cycle, messages, method, keeps)
        assert ours == answered(RequestResponseCycle, messages, method, keeps)


def test_what_no_header_may_have() -> None:
    for code in range(256):
        character = bytes([code])
        for header in ((b"a" + character, b"1"), (b"a", b"1" + character)):
            if header[0] != header[0].lower():
                continue
            messages = [start(200, [header]), body(b"")]
            ours = answered(Cycle, messages, "POST", True)
            assert ours == answered(RequestResponseCycle, messages, "POST", True)


@pytest.mark.parametrize(
    "messages",
    [
        [body(b"x")],
        [start(200, []), start(200, [])],
        [start(200, []), body(b""), body(b"")],
    ],
)
def test_messages_out_of_order(messages: Sequence[Any]) -> None:
    ours = answered(Cycle, messages, "POST", True)
    assert ours[3] == len(messages) - 1
    assert ours == answered(RequestResponseCycle, messages, "POST", True)
