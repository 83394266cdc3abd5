"""Work that runs as long as a context does."""

from __future__ import annotations

import asyncio

import pytest

from disagg.router.server.background import background


@pytest.mark.parametrize("fails", [False, True])
def test_it_has_ended_when_the_context_has(fails: bool) -> None:
    seen = list[str]()

    async def work() -> None:
        seen.append("begins")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            seen.append("ends")

    async def serve() -> None:
        async with background(work()):
            await asyncio.sleep(0)
            seen.append("serves")
            if fails:
                raise RuntimeError

    if fails:
        with pytest.raises(RuntimeError):
            asyncio.run(serve())
    else:
        asyncio.run(serve())
    assert seen == ["begins", "serves", "ends"]
