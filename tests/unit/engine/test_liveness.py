"""`/health` fails while the engine process hangs. Real hangs: tests/cluster/test_serve.py."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from disagg.engine import liveness as module
from disagg.engine.liveness import Liveness, LivenessHealth


def test_health_follows_the_engine_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_S", 0.1)
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    asyncio.run(_follow())


async def _follow() -> None:
    moves = asyncio.Event()
    moves.set()
    pulse = Liveness(moves.wait)
    inner = Starlette(
        routes=[Route(path, lambda _: Response()) for path in ("/health", "/metrics")]
    )
    transport = httpx.ASGITransport(LivenessHealth(inner, pulse))
    beating = asyncio.create_task(pulse.run())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as client:

        async def status(path: str) -> int:
            return (await client.get(path)).status_code

        await asyncio.sleep(0.3)
        assert await status("/health") == 200
        moves.clear()
        await asyncio.sleep(0.3)
        assert pulse.silent_s > 0.2
        assert (await status("/health"), await status("/metrics")) == (503, 200)
        moves.set()
        await asyncio.sleep(0.1)
        assert await status("/health") == 200
    beating.cancel()


def test_an_error_of_the_engine_ends_the_loop() -> None:
    async def dead() -> None:
        raise RuntimeError("dead")

    with pytest.raises(RuntimeError, match="dead"):
        asyncio.run(Liveness(dead).run())
