"""A headless Chromium, driven over its DevTools protocol. It records what a page loads and says.

`apt-get install chromium` brings one. It runs without its sandbox, which root and containers have
not: it may read only pages of ours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
START_S, ANSWER_S = 60.0, 30.0


def program() -> str | None:
    """The browser of this machine, if it has one."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One tab. errors: of its console and its scripts. requested: the URLs that it asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def read(self) -> None:
        """Take what the browser sends, until it closes."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                future = self._answers.pop(said["id"])
                if "error" in said:
                    future.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    future.set_result(said["result"])
                continue
            self._note(said["method"], said["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        """One command of the protocol."""
        self._number += 1
        future = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        async with asyncio.timeout(ANSWER_S):
            return await future

    async def look(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Be a window of this size, with this color scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def open(self, url: str) -> None:
        """Go there. It does not wait for the page."""
        await self.call("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        said = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in said:
            raise RuntimeError(json.dumps(said["exceptionDetails"]))
        return said["result"].get("value")

    async def until(self, script: str, timeout_s: float = ANSWER_S) -> None:
        """Wait until the expression is true. It may fail before, as while a page loads."""
        deadline, error = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            try:
                if await self.run(script):
                    return
            except RuntimeError as failed:
                error = str(failed)
            await asyncio.sleep(0.1)
        raise AssertionError(f"not true in time: {script} {error}")

    async def key(self, name: str) -> None:
        """Press and release a key, such as `Tab`."""
        codes = {"Tab": 9, "ArrowLeft": 37, "Home": 36, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if name == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name,
                windowsVirtualKeyCode=codes[name], **text,
            )  # fmt: skip

    async def screenshot(self, path: Path, *, most_height: int | None = None) -> None:
        """A PNG of the whole page, or of its first part."""
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        height = min(size["height"], most_height or size["height"])
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(folder: Path, options: Sequence[str] = ()) -> AsyncIterator[Page]:
    """A browser with one tab. `folder`: for its profile."""
    name = program()
    assert name is not None
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    words += ["--no-first-run", "--hide-scrollbars", "--remote-debugging-port=0", *options]
    process = await asyncio.create_subprocess_exec(
        name,
        *words,
        f"--user-data-dir={folder}",
        "about:blank",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        port = await _port(folder / "DevToolsActivePort", process)
        async with aiohttp.ClientSession() as client:
            url = await _tab(client, port)
            async with client.ws_connect(url, max_msg_size=64 << 20) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                for part in ("Page", "Runtime", "Network", "Log"):
                    await page.call(f"{part}.enable")
                yield page
                reading.cancel()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        async with asyncio.timeout(START_S):
            await process.wait()


async def _port(file: Path, process: asyncio.subprocess.Process) -> int:
    deadline = time.monotonic() + START_S
    while not (lines := await asyncio.to_thread(_lines, file)):
        assert process.returncode is None, "the browser ended while starting"
        assert time.monotonic() < deadline, "the browser did not start in time"
        await asyncio.sleep(0.05)
    return int(lines[0])


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


async def _tab(client: aiohttp.ClientSession, port: int) -> str:
    deadline = time.monotonic() + START_S
    while True:
        async with client.get(f"http://127.0.0.1:{port}/json/list") as answer:
            tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
        if tabs:
            url: str = tabs[0]["webSocketDebuggerUrl"]
            return url
        assert time.monotonic() < deadline, "the browser opened no tab"
        await asyncio.sleep(0.05)
