from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from disagg.errors import PeerRefused
from disagg.transport.control.data_channel import decoder, encode

SOURCES = sorted((Path(__file__).parents[4] / "disagg").rglob("*.py"))

# msgspec builds its plan of a type at the first use, and another thread may use it half built.
CONCURRENT = """
import sys, threading
import msgspec
from disagg.transport.control.data_channel import decoder, encode

sys.setswitchinterval(1e-6)
for _ in range(300):
    class Kind(msgspec.Struct, array_like=True):
        number: int
        of: "dict[str, list[int]] | None"
        pair: "tuple[int, ...]"
    decode, message = decoder(Kind), encode(Kind(1, {"a": [1]}, (1,)))
    start = threading.Barrier(8)
    def first():
        start.wait()
        assert decode(message).pair == (1,)
    threads = [threading.Thread(target=first) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


class Kind(msgspec.Struct, frozen=True, array_like=True):
    number: int


def test_a_message_is_decoded() -> None:
    assert decoder(Kind)(encode(Kind(3))) == Kind(3)


@pytest.mark.parametrize("body", [b"", b"\xff", encode(["three"]), encode({"number": 3})])
def test_anything_else_is_refused_by_the_message_it_should_be(body: bytes) -> None:
    with pytest.raises(PeerRefused, match="Kind not understood"):
        decoder(Kind)(body)


def test_first_messages_arrive_in_many_threads_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CONCURRENT], timeout=60, check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_decoders_of_a_type_are_made_at_import(source: Path) -> None:
    """`msgspec.….decode(body, type=X)` builds X's plan at its first call, in any thread."""
    tree = ast.parse(source.read_text())
    lines = [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and _is_msgspec(call.func, "decode", "convert")
        if any(keyword.arg == "type" for keyword in call.keywords) or len(call.args) > 1
    ]
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            if function.name != "decoder":
                lines += [
                    call.lineno
                    for call in ast.walk(function)
                    if isinstance(call, ast.Call) and _is_msgspec(call.func, "Decoder")
                ]
    assert lines == []


def _is_msgspec(called: ast.expr, *names: str) -> bool:
    return (
        isinstance(called, ast.Attribute)
        and called.attr in names
        and ast.unparse(called).startswith("msgspec.")
    )
