"""A headless Chromium, driven like a user over its DevTools protocol.

For pages that need input. A page that needs none is read with `--dump-dom`.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_LOOK_S = 0.2
# Chromium uses descriptors 3 and 4 for its pipes. A shell cannot name descriptors above 9.
_START = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
os.dup2(pipes[0], 3)
os.dup2(pipes[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Moving(Exception):
    """The page is being replaced by another and cannot answer."""


class Page:
    """One tab."""

    def __init__(self, commands: IO[bytes], answers: IO[bytes]) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")
        attached = self._call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def open(self, url: str) -> None:
        """Load a URL. Returns before the page is complete."""
        self._call("Page.navigate", url=url)

    def look(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until_shown(self, *words: str, timeout_s: float = 30) -> str:
        """Wait until the page shows all these words. Returns the page's text."""
        deadline = time.monotonic() + timeout_s
        while True:
            text = self._text()
            if all(word in text for word in words):
                return text
            assert time.monotonic() < deadline, text
            time.sleep(_LOOK_S)

    def type(self, text: str, field: str | None = None) -> None:
        """Type into the field with this label, or into the field with the focus."""
        if field is not None:
            label = f"[...document.querySelectorAll('label')].find(e => e.textContent == {field!r})"
            self.look(f"{label}.parentElement.querySelector('input').focus()")
        self._call("Input.insertText", text=text)

    def click(self, words: str) -> None:
        """Click the button or link with exactly these words."""
        found = f"[...document.querySelectorAll('a,button')].find(e => e.textContent == {words!r})"
        self.look(f"{found}.click()")

    def size(self, width: int, height: int) -> None:
        """Set the window's size, in pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)

    def screenshot(self) -> bytes:
        """A screenshot of the page, as PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _text(self) -> str:
        try:
            text: str = self.look("document.body ? document.body.innerText : ''")
        except Moving:
            return ""
        return text

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": params, **self._session}
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while True:
            message = self._read()
            if message.get("id") == number:
                if "error" in message:
                    raise Moving(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def _read(self) -> dict[str, Any]:
        read = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            read += byte
        message: dict[str, Any] = json.loads(read)
        return message


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a new browser with an empty profile."""
    assert CHROMIUM is not None
    (their_in, our_out), (our_in, their_out) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = [*_OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        start = [sys.executable, "-c", _START, str(their_in), str(their_out)]
        process = subprocess.Popen(
            [*start, CHROMIUM, *options],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        try:
            with os.fdopen(our_out, "wb") as commands, os.fdopen(our_in, "rb") as answers:
                yield Page(commands, answers)
        finally:
            process.terminate()
            process.wait(10)
