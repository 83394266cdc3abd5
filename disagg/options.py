"""Options that several commands share: the router's settings of `router.pairing` in the YAML."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias

import typer

# As in `disagg.config`, which imports pydantic and so takes longer to import.
Role: TypeAlias = Literal["prefill", "decode"]

LOCAL_PREFILL_TOKENS_HELP = "Decode computes prompts of up to this many tokens itself."
PREFILL_WAIT_SHARE_HELP = (
    "Also prefill on decode if the wait for prefill exceeds this share of the prompt's compute "
    "time."
)
FIRST_TOKEN_HELP = "The role whose first token begins a stream: prefill or decode."
FIRST_TOKEN_HOLD_S_HELP = (
    "Longest time, in seconds, that prefill's first token is held until decode answers."
)

LocalPrefillTokens = Annotated[int, typer.Option(min=0, help=LOCAL_PREFILL_TOKENS_HELP)]
PrefillWaitShare = Annotated[float | None, typer.Option(min=0, help=PREFILL_WAIT_SHARE_HELP)]
FirstToken = Annotated[Role, typer.Option(help=FIRST_TOKEN_HELP)]
FirstTokenHoldS = Annotated[float, typer.Option(min=0, help=FIRST_TOKEN_HOLD_S_HELP)]


def json_list(name: str, text: str | None) -> list[Any] | None:
    """The list of an option that is written as vLLM takes it. Raises BadParameter."""
    if text is None:
        return None
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, list):
        hint = "write a JSON list, such as '[\"*\"]'"
        raise typer.BadParameter(f"{text!r} — {hint}", param_hint=name)
    return given
