"""A lease that nobody fetches is released, though the engine is busy or a connection breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from prometheus_client import generate_latest

from disagg.config import LimitsSection
from disagg.router.engines import lease_releases
from disagg.router.engines.lease_releases import LeaseReleases, Prefilled
from disagg.router.telemetry.metrics import RouterMetrics
from disagg.router.topology import EngineEndpoint
from disagg.router.upstream import client as upstream

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
GONE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"


@asynccontextmanager
async def engine(answers: Callable[[int], bytes | None]) -> AsyncIterator[tuple[str, list[int]]]:
    """Its URL, and the numbers of the requests so far. None: the connection breaks."""
    seen = list[int]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.readline():
            length = 0
            while (line := await reader.readline()).strip():
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            await reader.readexactly(length)
            seen.append(len(seen))
            answer = answers(seen[-1])
            if answer is None:
                writer.transport.abort()
                return
            writer.write(answer)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    server.close()


async def released(url: str) -> str:
    """The text of the metrics after one release."""
    metrics = RouterMetrics()
    async with upstream.open_client(LimitsSection(), None) as client:
        releases = LeaseReleases(client, metrics)
        prefilled = Prefilled(EngineEndpoint("prefill-0", "prefill", url), {"lease": 1}, b"")
        releases.hold(prefilled)
        releases.give_back(prefilled)
        assert releases.by_engine() == {"prefill-0": 1}
        await releases.close()
        assert releases.by_engine() == {}
    return generate_latest(metrics.registry).decode()


@pytest.mark.parametrize(("answer", "outcome"), [(OK, "released"), (GONE, "refused")])
def test_until_the_engine_answers(answer: bytes, outcome: str) -> None:
    async def run() -> None:
        async with engine(lambda number: answer if number == 3 else None) as (url, seen):
            text = await released(url)
            assert f'disagg_router_releases_total{{outcome="{outcome}"}} 1.0' in text
            assert seen == [0, 1, 2, 3]

    asyncio.run(run())


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(lease_releases, "RELEASE_S", 0.3)

    async def run() -> None:
        async with engine(lambda number: None) as (url, seen):
            text = await released(url)
            assert 'disagg_router_releases_total{outcome="failed"} 1.0' in text
            assert seen

    asyncio.run(run())
    assert "it ends at its deadline" in caplog.text
