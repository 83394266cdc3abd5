"""Every field of completions and chats, in streams whose engines are cut off amid the answer:
others go on, and what came is one engine's answer. What cannot go on ends with an error."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from disagg.router.request.plan import RequestPlan
from disagg.router.request.stream_state import watched
from engine.conftest import Fleet, routed
from engine.cut_proxy import cut_streams
from engine.fields import CHAT, COMPLETION, cases, differing, numbered, streamed

ENGINES = ("producer", "consumer", "single")
MOST_CUTS = 3


@pytest.mark.parametrize(
    ("first", "of_each_field"),
    [
        ("decode", 1),
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
