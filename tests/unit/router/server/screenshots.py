"""Makes the pictures of docs/router.md:
`PYTHONPATH=.:tests python -m unit.router.server.screenshots`.

A router serves fake engines for ten minutes, among them one that restarts, and a browser takes the
pictures. They show the page, not a speed: what the engines tell is made up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from PIL import Image
from unit.router.server import chromium
from unit.router.server.metered_engine import TOKENS, MeteredEngine

from disagg.config import Role, RouterSection
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.topology import Away, EngineEndpoint

ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
TICK_S = 0.25
MOST_BYTES = 200_000
# Name, width, dark, and the most of the page's height.
SHOTS = (
    ("ui-wide.png", 1100, False, 1130),
    ("ui-wide-dark.png", 1100, True, 1130),
    ("ui-phone.png", 360, False, 2200),
    ("ui-phone-dark.png", 360, True, 2200),
)


class Scene:
    """A router, its engines, and requests that come now faster, now slower."""

    def __init__(self, engines: Sequence[MeteredEngine], seconds: float) -> None:
        self.engines, self.seconds = engines, seconds
        self.endpoints: list[EngineEndpoint] = []
        self.url = ""
        self._random = random.Random(7)
        self._running: set[asyncio.Task[None]] = set()

    async def play(self, server: RouterServer) -> None:
        """Until it is cancelled. An engine dies after half of the time, and is back soon."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with aiohttp.ClientSession() as client:
            while True:
                share = (loop.time() - began) / self.seconds
                is_gone = 0.5 < share < 0.58
                engines = self.endpoints[: 3 if is_gone else 4]
                gone = {"decode-1": Away("starts again")} if is_gone else {}
                await server.replace(engines, gone)
                if 0.58 <= share < 0.59:
                    self.engines[3].restart()
                self.engines[2].dies = 0.8 < share < 0.805
                self._send(client, 6 + 5 * math.sin(12 * share) + self._random.uniform(-1, 1))
                self._pace(share)
                await asyncio.sleep(TICK_S)

    def _send(self, client: aiohttp.ClientSession, rate: float) -> None:
        for _ in range(round(max(0.0, rate) * TICK_S + self._random.random())):
            task = asyncio.create_task(self._complete(client))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _complete(self, client: aiohttp.ClientSession) -> None:
        prompt = [self._random.randrange(32_000) for _ in range(64)]
        body = {"model": "m", "prompt": prompt, "stream": True}
        with contextlib.suppress(aiohttp.ClientError):
            async with client.post(f"{self.url}/v1/completions", json=body) as answer:
                await answer.read()

    def _pace(self, share: float) -> None:
        """Engines are slower the more they have to do, as real ones are."""
        busy = len(self._running)
        for engine in self.engines:
            is_prefill = engine.role == "prefill"
            engine.running = busy // 4 if is_prefill else busy // 2
            engine.first_byte_s = 0.03 + 0.004 * busy if is_prefill else 0.005
            engine.chunk_s = 0.03 + 0.0005 * busy
            engine.kv_usage = min(0.97, 0.1 + 0.04 * busy + 0.05 * math.sin(30 * share))
            engine.slowness = 1 + 0.02 * busy + self._random.uniform(0, 0.2)


@asynccontextmanager
async def playing(seconds: float) -> AsyncIterator[Scene]:
    """A scene that has played so long, and still plays."""
    engines = [MeteredEngine(role, chunks=TOKENS) for role in ROLES]
    scene = Scene(engines, seconds)
    for number, engine in enumerate(engines):
        await engine.start()
        name = f"{engine.role}-{number % 2}"
        scene.endpoints.append(EngineEndpoint(name, engine.role, engine.url))
    section = RouterSection.model_validate(
        {"port": 0, "access_log": False, "pairing": {"local_prefill_tokens": 0}}
    )
    sock = bind("127.0.0.1", 0)
    server = RouterServer(create_app(section, scene.endpoints), sock)
    scene.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    await server.start()
    try:
        task = asyncio.create_task(scene.play(server))
        await asyncio.wait([task], timeout=seconds)
        yield scene
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        await server.stop(1)
        for engine in engines:
            await engine.stop()


async def take(url: str, folder: Path) -> None:
    """Take all pictures of this router's page."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        async with chromium.browser(Path(profile)) as page:
            await page.look(1280)
            await page.open(f"{url}/ui")
            await page.until("document.querySelectorAll('path.series').length > 8")
            for name, width, is_dark, height in SHOTS:
                await page.look(width, dark=is_dark)
                await asyncio.sleep(0.5)  # it draws anew
                await page.screenshot(folder / name, most_height=height)
                _make_small(folder / name)
    sizes = {name: (folder / name).stat().st_size for name, *_ in SHOTS}
    for name, size in sizes.items():
        print(f"{folder / name}: {size:,} bytes")
    if max(sizes.values()) > MOST_BYTES:
        raise SystemExit(f"one is over {MOST_BYTES:,} bytes")


def _make_small(picture: Path) -> None:
    """256 colors show all of it."""
    with Image.open(picture) as opened:
        colors = opened.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    colors.save(picture, optimize=True)


async def main() -> None:
    """Play, then take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="length of the history")
    parser.add_argument("--folder", type=Path, default=Path("docs/images"))
    given = parser.parse_args()
    if chromium.program() is None:
        raise SystemExit("no browser here: apt-get install chromium")
    logging.disable(logging.ERROR)  # an engine breaks off answers
    async with playing(given.seconds) as scene:
        await take(scene.url, given.folder)


if __name__ == "__main__":
    asyncio.run(main())
