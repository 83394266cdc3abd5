"""The peers' commands and what their routers compare."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from vllm_router.launch_router import parse_router_args

from disagg.bench.serve.ray_serve import text
from disagg.bench.serve.scene import vllm_router
from disagg.errors import StartupError
from disagg.testing.launch import launch

URLS = ["http://127.0.0.1:1", "http://127.0.0.1:2"]


@pytest.mark.parametrize(
    "command",
    [vllm_router(plain=URLS), vllm_router(prefill=URLS[:1], decode=URLS[1:])],
    ids=["colocated", "apart"],
)
def test_vllm_router_takes_its_command(command: list[str]) -> None:
    given = parse_router_args([word.replace("{port}", "3") for word in command[1:]])
    assert given.port == 3
    urls = [*given.worker_urls, *(url for url, _ in given.prefill_urls), *given.decode_urls]
    assert urls == URLS


def test_a_command_that_is_not_there_did_not_start() -> None:
    with ExitStack() as stack, pytest.raises(StartupError, match="the peer did not start"):
        launch(stack, "the peer", ["/nowhere/vllm-router"])


def test_each_token_is_one_character() -> None:
    ids = [*range(0xD700, 0xE100), 0, 1, 151_935]
    found = text(ids)
    assert len(found) == len(set(found)) == len(ids)
    assert found.encode().decode() == found, "no surrogates, which nothing could send"
    assert text(ids[:7]) == found[:7]
