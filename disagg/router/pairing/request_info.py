"""What pairing policies see of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from disagg.router.caches.block_keys import PromptBlocks


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
    def prefix_keys(self) -> Sequence[int]:
        """See `prompt_length.prefixes`."""

    @property
    def model(self) -> Any:
        """The model's name as the client gave it."""

    @property
    def blocks(self) -> PromptBlocks | None:
        """The prompt's blocks, if its token ids are known."""
