"""When a router process yields its core to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg.router.upstream.loop_yield import LoopYield


async def a_turn(loop_yield: LoopYield, connections: int) -> None:
    """Chunks arrive on this many connections in one turn of the event loop."""
    for _ in range(connections):
        loop_yield.data_arrived()
    for _ in range(3):
        await asyncio.sleep(0)


def yields(use: Callable[[LoopYield], object], slow: float = 0) -> int:
    """How often the core was yielded. `slow`: seconds for which another process keeps it."""
    count, now = 0, 0.0

    def sched_yield() -> None:
        nonlocal count, now
        count, now = count + 1, now + slow

    use(LoopYield(sched_yield, lambda: now))
    return count


def test_it_yields_after_a_turn_with_several_connections() -> None:
    assert yields(lambda loop_yield: asyncio.run(a_turn(loop_yield, 3))) > 1
    assert yields(lambda loop_yield: asyncio.run(a_turn(loop_yield, 200))) > 1


def test_it_does_not_yield_after_few() -> None:
    async def many_turns(loop_yield: LoopYield) -> None:
        for _ in range(20):
            await a_turn(loop_yield, 2)

    assert yields(lambda loop_yield: asyncio.run(many_turns(loop_yield))) == 0


def test_not_again_before_more_arrives() -> None:
    async def one_turn_and_quiet(loop_yield: LoopYield) -> None:
        await a_turn(loop_yield, 5)
        await asyncio.sleep(0.02)

    once = yields(lambda loop_yield: asyncio.run(a_turn(loop_yield, 5)))
    assert yields(lambda loop_yield: asyncio.run(one_turn_and_quiet(loop_yield))) == once


def test_a_process_that_keeps_the_core_gets_it_once() -> None:
    assert yields(lambda loop_yield: asyncio.run(a_turn(loop_yield, 5)), slow=0.01) == 1
