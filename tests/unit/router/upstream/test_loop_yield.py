"""When a router process offers its core to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from disagg.router.upstream.loop_yield import LoopYield


async def a_turn(turns: LoopYield, connections: int) -> None:
    """So many connections bring something in one turn of the loop."""
    for _ in range(connections):
        turns.came()
    for _ in range(3):
        await asyncio.sleep(0)


def offered(use: Callable[[LoopYield], object], slow: float = 0) -> int:
    """How often the core was offered; whoever takes it keeps it for so many seconds."""
    count, now = 0, 0.0

    def give_way() -> None:
        nonlocal count, now
        count, now = count + 1, now + slow

    use(LoopYield(give_way, lambda: now))
    return count


def test_after_a_turn_with_several_connections() -> None:
    assert offered(lambda turns: asyncio.run(a_turn(turns, 3))) > 1
    assert offered(lambda turns: asyncio.run(a_turn(turns, 200))) > 1


def test_not_after_few() -> None:
    async def many_turns(turns: LoopYield) -> None:
        for _ in range(20):
            await a_turn(turns, 2)

    assert offered(lambda turns: asyncio.run(many_turns(turns))) == 0


def test_not_again_before_more_comes() -> None:
    async def one_turn_and_quiet(turns: LoopYield) -> None:
        await a_turn(turns, 5)
        await asyncio.sleep(0.02)

    once = offered(lambda turns: asyncio.run(a_turn(turns, 5)))
    assert offered(lambda turns: asyncio.run(one_turn_and_quiet(turns))) == once


def test_whoever_keeps_the_core_gets_it_once() -> None:
    assert offered(lambda turns: asyncio.run(a_turn(turns, 5)), slow=0.01) == 1
