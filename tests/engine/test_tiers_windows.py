"""Tiers of a model with several KV cache groups, whose window is much shorter than the prompt.

The engines are this test's own: one without tiers is the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from disagg.testing.vllm_server import VllmServer, token_ids
from engine.conftest import beside, lengths, running, tiers, transfer
from engine.engines_with_tiers import ANSWER, EnginesWithTiers, Prompt
from engine.followed import check_followed
from engine.windows import BLOCK, GROUP_BYTES, WINDOW, make_windows

GROUPS, WINDOWED = 3, 2
# So small that a few prompts push each other out of the engine's own cache.
ARGS = ("--max-model-len", "4096", "--num-gpu-blocks-override", "128")
STEPS = ("--max-num-batched-tokens", "384", "--max-num-seqs", "16")


@pytest.fixture(scope="module")
def engines(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnginesWithTiers]:
    model = tmp_path_factory.mktemp("model") / "windows"
    make_windows(model)
    folder, logs = str(tmp_path_factory.mktemp("tiers")), tmp_path_factory.mktemp("logs")
    env = {"TMPDIR": str(tmp_path_factory.mktemp("tmp")), "VLLM_SERVER_DEV_MODE": "1"}

    def server(name: str, config: dict[str, object] | None) -> VllmServer:
        return vllm_server(name, model, logs / name, config, (*ARGS, *STEPS), env=env)

    both = beside(
        transfer("kv_both"), tiers(host_bytes=1 << 28, directory=folder, reset_keeps_files=True)
    )
    servers = server("plain", None), server("first", both), server("second", both)
    with running(servers):
        yield EnginesWithTiers(*servers, GROUP_BYTES)


def needed(full: int) -> int:
    """Blocks of all groups, for so many computed ones."""
    skipped = max(0, full * BLOCK - WINDOW + 1) // BLOCK
    return full + WINDOWED * (full - skipped)


@lengths(640, long=[129, 3001])
def test_answers_and_what_is_loaded(engines: EnginesWithTiers, prompt: Prompt, length: int) -> None:
    full, all_full = (length - 1) // BLOCK, (length + ANSWER - 1) // BLOCK
    loads = needed(full), needed(all_full)
    engines.check_what_is_loaded(prompt, length, full * BLOCK, GROUPS * all_full, loads)


@lengths(2, 385, long=[257, 1400, 3000])
def test_followed(engines: EnginesWithTiers, prompt: Prompt, length: int) -> None:
    def right(ids: list[int]) -> list[list[int]]:
        return token_ids(engines.plain.complete(ids))

    check_followed(engines.first, engines.second, lambda: prompt(length), right)


def test_beside_the_handoff_and_under_pressure(engines: EnginesWithTiers, prompt: Prompt) -> None:
    engines.check_under_pressure(prompt)
