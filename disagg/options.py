"""Options that several commands have: settings of the router that a load is measured or planned
with. As in `router.pairing` of the YAML."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import typer

Role: TypeAlias = Literal["prefill", "decode"]  # without pydantic, which takes a while

LocalPrefillTokens = Annotated[
    int, typer.Option(min=0, help="Decode computes up to so long a prompt itself.")
]
PrefillWaitShare = Annotated[
    float | None,
    typer.Option(min=0, help="And any that waits longer for prefill, by this share."),
]
FirstToken = Annotated[Role, typer.Option(help="Whose first token a stream begins with.")]
FirstTokenHoldS = Annotated[
    float, typer.Option(min=0, help="How long prefill's may wait for decode's.")
]
