"""What pairing policies see of a request, and what they answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from disagg.router.api.prompt_length import Prefixes
from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.topology import EngineEndpoint


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine, and about what the prompt costs it: the tokens that it has to compute or fetch, in
    computed tokens. All of them, where nothing is known of its cache."""

    engine: EngineEndpoint
    work: int


class RequestInfo(Protocol):
    """A request as policies see it. `request.plan.RequestPlan` is one."""

    @property
    def headers(self) -> Mapping[str, str]:
        """The client's."""

    @property
    def client(self) -> str | None:
        """The name of the client's key."""

    @property
    def tokens(self) -> int:
        """About how many tokens the prompt has."""

    @property
    def prefixes(self) -> Prefixes:
        """Keys of the prompt's prefixes."""

    @property
    def model(self) -> Any:
        """The model's name as the client gave it."""

    @property
    def blocks(self) -> PromptBlocks | None:
        """The prompt's blocks, if its token ids are known."""
