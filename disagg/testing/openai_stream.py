"""Reads a streamed answer of an OpenAI endpoint, event by event."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from disagg.testing.http import client

ANSWER_S = 300.0


def stream(
    url: str, body: dict[str, Any], headers: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The JSON of each event. Raises `httpx.HTTPError` or RuntimeError with the error's text."""
    with client().stream("POST", url, json=body, timeout=ANSWER_S, headers=headers) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event: dict[str, Any] = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(str(event["error"]))
                yield event
