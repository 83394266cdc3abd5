"""Every field that vLLM's completions and chats have, through both legs: the answer is that of one
engine without us, whole and streamed, in text, tokens, log-probabilities, ends, usage and errors.

The fields are those of the vLLM that is installed, so that a new one must be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disagg.testing.waiting import eventually
from engine.conftest import Fleet, begun, routed
from engine.fields import (
    BOTH,
    CHAT,
    COMPLETION,
    ONLY,
    cases,
    differing,
    numbered,
    streamed,
    whole,
)

ENGINES = ("producer", "consumer", "single")
Ask = Callable[[str, str, dict[str, Any]], dict[str, Any]]
# Not for clients, or of engines that are not these.
ELSEWHERE = {"kv_transfer_params", "ec_transfer_params", "prompt_embeds"}


def test_no_field_is_forgotten() -> None:
    # Imported here: other tests need not wait for vLLM.
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    for path, fields in (
        (COMPLETION, CompletionRequest.model_fields.keys()),
        (CHAT, ChatCompletionRequest.model_fields.keys()),
    ):
        assert {*BOTH, *ONLY[path]} | ELSEWHERE >= fields
        assert fields >= {*ONLY[path]}


@pytest.fixture(scope="module")
def url(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[str]:
    """Of a router, by whose first token streams begin with; `watched`: another engine could go on
    with them."""
    fleet.wake(*ENGINES)
    first = "prefill" if request.param == "prefill" else "decode"
    decodes = [fleet.consumer, *([fleet.producer] if request.param == "watched" else [])]
    pairing = {"first_token": first, "local_prefill_tokens": 0}
    with routed([fleet.producer], decodes, pairing=pairing) as url:

        def is_known() -> bool:
            """What the engines say of themselves."""
            streamed(url, COMPLETION, numbered(COMPLETION, {}))
            return first == "decode" or begun(url) > 0

        assert eventually(is_known)
        yield url


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
@pytest.mark.parametrize(
    ("url", "ask", "of_each_field"),
    [
        ("decode", whole, None),
        pytest.param("decode", streamed, None, marks=pytest.mark.slow),
        ("prefill", streamed, 1),
        pytest.param("prefill", streamed, None, marks=pytest.mark.slow),
        pytest.param("watched", streamed, 1, marks=pytest.mark.slow),
        pytest.param("watched", streamed, None, marks=pytest.mark.slow),
    ],
    indirect=["url"],
)
def test_as_one_engine_answers(
    fleet: Fleet, url: str, path: str, ask: Ask, of_each_field: int | None
) -> None:
    asked = [(more, numbered(path, more)) for more in cases(path, of_each_field=of_each_field)]
    # Beside one of these vLLM 0.32 gives others log-probabilities of -9999.
    alone = [(more, body) for more, body in asked if "logprob_token_ids" in more]
    together = [(more, body) for more, body in asked if "logprob_token_ids" not in more]
    wrong: list[str] = []

    def compare(one: tuple[dict[str, Any], dict[str, Any]]) -> None:
        more, body = one
        got, expected = ask(url, path, body), ask(fleet.single.url, path, body)
        found = (f"{str(more)[:300]}\n  {each[:500]}" for each in differing(got, expected))
        wrong.extend(found)

    with ThreadPoolExecutor(4) as pool:
        [*pool.map(compare, together)]
    [*map(compare, alone)]
    assert not wrong, "\n".join(wrong)
