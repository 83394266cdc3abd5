"""Two engines that hand over to each other and share a folder of files, and a plain one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from disagg.testing.vllm_server import VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.resets import reset_caches

Prompt = Callable[[int], list[int]]
ANSWER = 150
"""Tokens of an answer of which all blocks are kept."""


class EnginesWithTiers(NamedTuple):
    """`block_bytes`: of a block of one KV cache group. `transport`: of the handoff beside."""

    plain: VllmServer
    first: VllmServer
    second: VllmServer
    block_bytes: int
    transport: str = "process_memory"

    def moved(self, engine: VllmServer, medium: str) -> int:
        """Blocks of a group, by their bytes."""
        name = "vllm:kv_offload_total_bytes_total"
        return int(engine.metric(name, transfer_type=medium)) // self.block_bytes

    def check_what_is_loaded(
        self, prompt: Prompt, length: int, full: int, kept: int, needed: tuple[int, int]
    ) -> None:
        """From host memory, from files, by another engine, and the next turn of a conversation.

        full: tokens in full blocks before the prompt's last one; kept: blocks of all groups that
        come to be in files; needed: what a load brings of the prompt again, and of the next turn.
        """
        plain, first, second = self[:3]
        ids = prompt(length)
        options, before = {"max_tokens": ANSWER}, files(first)
        reference = plain.complete(ids, **options)
        answers = [first.complete(ids, **options)]
        assert eventually(lambda: files(first) - before == kept)
        sources = ((first, "CPU_to_GPU", False), (first, "STORAGE_to_CPU", True))
        for engine, medium, host in (*sources, (second, "STORAGE_to_CPU", True)):
            forget(engine, host=host)
            loaded = self.moved(engine, medium)
            answers.append(engine.complete(ids, **options))
            assert self.moved(engine, medium) - loaded == needed[0]
        assert [token_ids(answer) for answer in answers] == [token_ids(reference)] * 4
        cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers[1:]]
        assert cached == [full] * 3

        turn = [*ids, *token_ids(reference)[0], *prompt(50)]
        forget(second, host=True)
        loaded = self.moved(second, "CPU_to_GPU")
        assert token_ids(second.complete(turn)) == token_ids(plain.complete(turn))
        # The last token of an answer is never computed.
        assert self.moved(second, "CPU_to_GPU") - loaded == needed[1]

    def check_under_pressure(self, prompt: Prompt) -> None:
        """Handed over, and continued by either engine, whose own caches hold few of these."""
        plain, first, second = self[:3]
        base = prompt(900)
        prompts = [[*base[: 300 * (i % 4)], *prompt(200 + 150 * i)] for i in range(8)]
        references = [token_ids(plain.complete(ids)) for ids in prompts]

        def one(number: int) -> bool:
            ids, producer, consumer = prompts[number % 8], *(first, second)[:: 1 - number % 2 * 2]
            params = {"kv_transfer_params": producer.prefill(ids)} if number % 3 else {}
            return token_ids(consumer.complete(ids, **params)) == references[number % 8]

        def loaded() -> int:
            return sum(self.moved(engine, "CPU_to_GPU") for engine in (first, second))

        before = loaded()
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(one, range(24)))
        assert loaded() > before
        for engine in (first, second):
            assert engine.metric("disagg_handoff_bytes_total", transport=self.transport) > 0
            assert eventually(lambda engine=engine: is_idle(engine))
            assert not sum(engine.metrics("disagg_tier_failures").values())


def files(engine: VllmServer) -> float:
    """That it has written."""
    return engine.metric("disagg_tier_stored_total", tier="directory")


def is_idle(engine: VllmServer) -> bool:
    """Whether no slot is in use."""
    return not any(
        engine.metric("disagg_tier_in_use_chunks", tier=tier) for tier in ("host", "directory")
    )


def forget(engine: VllmServer, *, host: bool) -> None:
    """What its own cache has, and the host tier."""
    assert eventually(lambda: is_idle(engine))
    reset_caches(engine, host=host)
