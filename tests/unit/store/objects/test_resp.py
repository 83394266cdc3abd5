"""The protocol against servers that answer anything, or nothing."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from disagg.store.objects.base import StoreError
from disagg.store.objects.resp import Address, Connection

Serve = Callable[[bytes], Connection]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Connections to a server that says the given bytes to whatever it hears, and no more."""
    with contextlib.ExitStack() as opened:

        def start(said: bytes) -> Connection:
            listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

            def answer() -> None:
                with contextlib.suppress(OSError):
                    peer = opened.enter_context(listener.accept()[0])
                    peer.recv(1)
                    peer.sendall(said)
                    peer.shutdown(socket.SHUT_WR)

            threading.Thread(target=answer, daemon=True).start()
            connection = Connection(Address("127.0.0.1", listener.getsockname()[1]))
            opened.callback(connection.close)
            return connection

        yield start


def test_replies_of_all_kinds(serve: Serve) -> None:
    connection = serve(b"+OK\r\n:12\r\n$3\r\na\r\n\r\n$-1\r\n$0\r\n\r\n-ERR no\r\n")
    *replies, error = connection.call([[b"X"]] * 6, 10)
    assert replies == [1, 12, b"a\r\n", None, b""]
    assert isinstance(error, StoreError)
    assert (error.reason, str(error)) == ("refused", "the server said: ERR no")


def test_a_value_goes_straight_into_buffers(serve: Serve) -> None:
    value = random.Random(1).randbytes(3_000_000)
    connection = serve(b"$%d\r\n%b\r\n" % (len(value), value))
    memory = bytearray(len(value))
    view = memoryview(memory)
    buffers = [view[:7], view[7:7], view[7:100_000], view[100_000:]]
    assert connection.read_value([b"GET"], buffers, 10) == len(value)
    assert memory == value


def test_a_value_of_another_size_is_not_read(serve: Serve) -> None:
    memory = bytearray(b"x" * 5)
    assert serve(b"$7\r\nabcdefg\r\n").read_value([b"GET"], [memoryview(memory)], 10) == 7
    assert memory == b"x" * 5
    assert serve(b"$-1\r\n").read_value([b"GET"], [memoryview(memory)], 10) == 0


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "unreachable"),
        (b"$5\r\nab", "unreachable"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "protocol"),
        (b"\r\n", "protocol"),
        (b"*1\r\n:1\r\n", "protocol"),
        (b"$\r\n", "protocol"),
        (b"$1e3\r\n", "protocol"),
        (b"$99999999999999999999999\r\n", "protocol"),
        (b"$5\r\nabcdefgh\r\n", "protocol"),
        (b"x" * 100_000, "protocol"),
        (b"$99999999999\r\n", "protocol"),
    ],
)
def test_what_is_no_reply_is_an_error(serve: Serve, said: bytes, reason: str) -> None:
    for use in (
        lambda connection: connection.call([[b"X"]], 10),
        lambda connection: connection.read_value([b"X"], [memoryview(bytearray(5))], 10),
    ):
        with pytest.raises(StoreError) as caught:
            use(serve(said))
        assert caught.value.reason == reason


def test_a_server_that_dawdles_does_not_outlast_the_deadline() -> None:
    """Byte for byte, each in time: what counts is the whole call."""
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def dawdle() -> None:
            peer = listener.accept()[0]
            with peer, contextlib.suppress(OSError):
                peer.sendall(b"$1000000\r\n")
                while not ended.wait(0.02):
                    peer.sendall(b"a")

        thread = threading.Thread(target=dawdle)
        thread.start()
        try:
            connection = Connection(Address("127.0.0.1", listener.getsockname()[1]))
            with contextlib.closing(connection), pytest.raises(StoreError) as caught:
                connection.read_value([b"GET"], [memoryview(bytearray(1_000_000))], 0.3)
            assert caught.value.reason == "timeout"
        finally:
            ended.set()
            thread.join(10)


def test_random_answers_are_errors_or_values(serve: Serve) -> None:
    chosen = random.Random(7)
    for _ in range(60):
        pieces = [b"$", b"5", b"\r\n", b"-", b":", b"+OK", b"abcde", bytes([chosen.randrange(256)])]
        said = b"".join(chosen.choices(pieces, k=chosen.randrange(12)))
        memory = bytearray(5)
        with contextlib.suppress(StoreError):
            size = serve(said).read_value([b"X"], [memoryview(memory)], 5)
            assert size != 5 or bytes(memory) in said
