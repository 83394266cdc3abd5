"""Every field of completions and chats, in streams whose engines are cut off amid the answer:
others go on, and what came is one engine's answer. What cannot go on ends with an error."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disagg.router.request.plan import RequestPlan
from disagg.router.request.stream_state import watched
from engine.conftest import Fleet, routed
from engine.cut_proxy import cut_streams
from engine.fields import CHAT, COMPLETION, cases, differing, numbered, streamed
from engine.streams import events_of

ENGINES = ("producer", "consumer", "single")
MOST_CUTS = 3


@pytest.mark.parametrize(
    ("first", "of_each_field"),
    [
        pytest.param("decode", 1, marks=pytest.mark.slow),
        ("prefill", 1),
        pytest.param("decode", None, marks=pytest.mark.slow),
        pytest.param("prefill", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_as_one_engine_answers(
    fleet: Fleet, path: str, first: str, of_each_field: int | None
) -> None:
    chance = random.Random(path + first)
    wrong: list[str] = []
    pairing = {"first_token": first, "local_prefill_tokens": 0, "decode": "round_robin"}
    with (
        cut_streams([fleet.consumer.url, fleet.producer.url]) as (decodes, cuts),
        routed([fleet.producer], decodes, pairing=pairing, migration_limit=MOST_CUTS) as url,
    ):

        def compare(one: tuple[str, bool, dict[str, Any], dict[str, Any]]) -> None:
            name, goes_on, more, body = one
            got = streamed(url, path, body, name)
            if cuts.cut[name] and not goes_on and got["status"] == 502:
                return
            expected = streamed(fleet.single.url, path, body)
            told = f"{str(more)[:300]} {cuts.plan[name][: cuts.cut[name]]}"
            wrong.extend(f"{told}\n  {each[:500]}" for each in differing(got, expected))

        asked = []
        for number, more in enumerate(cases(path, of_each_field=of_each_field)):
            if "logprob_token_ids" in more:
                continue  # must be alone, see `test_fields.py`
            name, body = f"request-{number}", numbered(path, more)
            goes_on = watched(RequestPlan(path, {**body, "stream": True})) is not None
            how_often = chance.randint(1, MOST_CUTS) if goes_on else number % 2
            # Behind the role or a token, with some of the next event, or all but its end.
            cuts.plan[name] = [
                (chance.randint(1, 5), chance.choice([0, 3, 40])) for _ in range(how_often)
            ]
            asked.append((name, goes_on, more, body))
        with ThreadPoolExecutor(4) as pool:
            [*pool.map(compare, asked)]
    assert not wrong, "\n".join(wrong)
    went_on = sum(cuts.cut[name] for name, goes_on, *_ in asked if goes_on)
    assert went_on > 0.5 * sum(goes_on for _, goes_on, *_ in asked)


def test_ids_in_the_middle_of_a_character(fleet: Fleet) -> None:
    """The client has the id of a token whose text only comes with the next. It gets none twice."""
    silent: list[tuple[dict[str, Any], int, dict[str, Any]]] = []
    for number in range(60):
        ids = [(7 * at + 77 * number) % 250 + 1 for at in range(60)]
        asked = {"prompt": ids, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
        body = {"model": "tiny", "temperature": 0, **asked}
        told = list[bytes]()
        events_of(fleet.single.url, COMPLETION, {**body, "stream": True}, told)
        choices = [json.loads(one[6:])["choices"][0] for one in told if one[6:7] == b"{"]
        spoken = next((at for at, one in enumerate(choices) if one["text"]), len(choices))
        ends = [at for at in range(spoken, len(choices)) if not choices[at]["text"]]
        if ends:
            silent.append((body, ends[0] + 1, streamed(fleet.single.url, COMPLETION, body)))
        if len(silent) == 6:
            break
    assert len(silent) >= 4, "no answer has half a character"
    with (
        cut_streams([fleet.consumer.url, fleet.producer.url]) as (decodes, cuts),
        routed([fleet.producer], decodes, migration_limit=MOST_CUTS) as url,
    ):
        for number, (body, events, expected) in enumerate(silent):
            name = f"request-{number}"
            cuts.plan[name] = [(events, 0), *([(1, 0)] if number % 2 else [])]
            got = streamed(url, COMPLETION, body, name)
            assert not [*differing(got, expected)]
    # A busy engine puts several tokens into an event, so that an answer may end before its cut.
    assert sum(cuts.cut.values()) >= 3
