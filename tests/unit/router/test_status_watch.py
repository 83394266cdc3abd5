"""`disagg status --watch`, in a terminal of 100 columns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console
from unit.router.conftest import AS_OPERATOR, Setup, wait_for
from unit.router.pairing.test_admission import complete
from unit.router.server.metered_engine import MeteredEngine

from disagg.router import status_watch
from disagg.router.operator_client import OperatorClient
from disagg.router.topology import Away
from disagg.testing.http import client

Make = Callable[..., Setup]
WAIT_S = 30.0
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COMMAND = [sys.executable, "-m", "disagg.cli", "status", "--watch", "--every", "0.5"]


class Terminal:
    """The command in a terminal of its own. `text`: all that it showed."""

    def __init__(self, *words: str) -> None:
        self.end, own = pty.openpty()
        fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 100, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):  # they may be another terminal's
            env.pop(name, None)
        self.process = subprocess.Popen(
            [*COMMAND, *words], stdin=own, stdout=own, stderr=own, env=env, start_new_session=True
        )
        os.close(own)
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the command ended
            while data := os.read(self.end, 65536):
                self.text += data.decode(errors="replace")

    def check_shows(self, pattern: str, after: int = 0) -> None:
        """Wait until what it showed from there on has such words."""
        found = wait_for(lambda: re.search(pattern, self.text[after:]), WAIT_S)
        assert found, f"no {pattern!r} in: …{ESCAPES.sub('', self.text)[-5000:]}"

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        os.close(self.end)


@pytest.fixture
def watch() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*words: str) -> Terminal:
        opened.append(Terminal(*words))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def test_it_shows_goes_on_and_ends(make: Make, watch: Callable[..., Terminal]) -> None:
    setup = make(kind=MeteredEngine)
    terminal = watch(setup.url)
    terminal.check_shows("2 of 2 engines up")
    # The router has read decode's counters: only what they grow by from now on is shown.
    terminal.check_shows(r"decode-0 .*40\.0% +0 +0\.0")
    for _ in range(6):
        complete(setup, list(range(20)))
    terminal.check_shows("moved, mean GB/s .*2.50")
    terminal.check_shows(r"moved, hidden .*60\.0%")
    setup.loop.run(setup.server.replace(setup.endpoints[:1], {"decode-0": Away("starts again")}))
    terminal.check_shows("down: starts again")

    drain = f"{setup.url}/disagg/drain"
    client().post(drain, headers=AS_OPERATOR)  # it refuses new requests for a moment
    seen = len(terminal.text)
    terminal.check_shows(r"no answer since \d\d:\d\d:\d\d", seen)
    assert terminal.process.poll() is None
    client().delete(drain, headers=AS_OPERATOR)
    seen = len(terminal.text)
    terminal.check_shows("1 of 2 engines up", seen)
    assert terminal.interrupt() == 0
    assert "Traceback" not in terminal.text


def test_a_router_that_never_answered_is_an_error() -> None:
    ended = subprocess.run(
        [*COMMAND, "http://127.0.0.1:9"], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "error: http://127.0.0.1:9: " in ended.stderr
    both = subprocess.run(
        [*COMMAND, "--json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert both.returncode == 2
    assert "--watch, --json: give one of them" in both.stderr


def test_without_a_terminal_pictures_follow_each_other(setup: Setup) -> None:
    with subprocess.Popen([*COMMAND, setup.url], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            assert "\x1b" not in line
            seen += "engines up" in line
            if seen == 2:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0


def picture(watched: status_watch.Watched) -> str:
    console = Console(width=status_watch.WIDTH, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(status_watch.picture(watched))
    return captured.get()


def large_state() -> status_watch.Watched:
    now = time.time()
    sample: dict[str, Any] = {
        "requests": 12345.0, "failed": 1.0, "tokens": 999999.0, "queued": 3.0, "in_flight": 1024.0,
        "ttft": [0.1234, 61.0], "between": [0.0123, 0.4], "speed": 1.234e11, "hidden": 1.0,
        "kv": {"a": 0.5}, "to": {"chat/decode-11": 1.1e11}, "spared": 0.625, "shared": 54321.0,
    }  # fmt: skip
    watched = status_watch.Watched(OperatorClient("http://127.0.0.1:9", None, None))
    watched.samples = [{"at": now - 600 + 2 * n, **sample} for n in range(295)]
    engines = [
        {
            "name": f"chat/{role}-1{n}", "role": role, "state": "up", "running": 512,
            "waiting": 1024, "kv_usage": 1.0, "leases": 1024,
        }
        for role in ("prefill", "decode")
        for n in range(2)
    ]  # fmt: skip
    engines[1]["state"] = "3 requests in a row failed"
    group = {
        "status": 503, "count": 12345, "why": "no decode engine answered in N s; \x1b[2J" * 3,
        "first": now, "last": now, "id": "f" * 32,
    }  # fmt: skip
    watched.state = {
        "at": now,
        "engines": engines,
        "failure_groups": [group],
        "router": {"caches": None, "sharing": None},
        "history": {"engines": {engine["name"]: now - 7000 for engine in engines}},
    }
    watched.events = [
        {"at": now, "engine": "chat/decode-11", "kind": "down", "why": "starts again"}
    ]
    return watched


def test_it_fits_100_columns_and_obeys_nobody() -> None:
    shown = picture(large_state())
    assert "\x1b" not in shown
    assert max(map(cell_len, shown.splitlines())) <= 100
    for words in (
        "chat/decode-11", "3 requests in a row", "110,000.0", "123.40", "12,345", "1.9 h",
        "first token p99", "61.00 s", "down: starts again", "█" * 29,
    ):  # fmt: skip
        assert words in shown, words
    assert shown.count("f") >= 32  # an id, to copy: folded, not cut
    assert "…" not in shown


def test_shared_caches_have_rows_where_a_deployment_has_them() -> None:
    watched = large_state()
    assert "from caches" not in picture(watched)
    assert "shared" not in picture(watched)
    counts = dict.fromkeys(("prompt_tokens", "expected_tokens", "reported_tokens"), 0.0)
    watched.state["router"] = {"caches": counts, "sharing": {"sources": {}, "tokens": 0.0}}
    shown = picture(watched)
    assert re.search(r"prompts from caches +62\.5% .*█", shown)
    assert re.search(r"shared, tokens/s +54,321 .*█", shown)
    assert max(map(cell_len, shown.splitlines())) <= 100


def test_an_old_value_says_how_old_it_is() -> None:
    watched = large_state()
    for sample in watched.samples[-20:]:
        sample["ttft"] = None
    row = next(line for line in picture(watched).splitlines() if "first token p50" in line)
    assert re.search(r"123\.4 ms .*(5\d|6\d) s", row), row
