"""What policies may look at of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.router.api import prompt_length
from disagg.router.topology import EngineEndpoint

_NO_HEADERS: Mapping[str, str] = {}


class RequestInfo:
    """What policies may look at: the endpoint's path, the client's body and headers."""

    def __init__(
        self, path: str, body: dict[str, Any], headers: Mapping[str, str] = _NO_HEADERS
    ) -> None:
        self.path, self.body, self.headers = path, body, headers
        self.partner: EngineEndpoint | None = None  # at the other end of the handoff
        # By hand: Python 3.11's cached_property takes a lock each time.
        self._tokens: int | None = None
        self._prefix_keys: list[int] | None = None

    @property
    def tokens(self) -> int:
        """About how long the prompt is."""
        if self._tokens is None:
            self._tokens = prompt_length.tokens(self.body)
        return self._tokens

    @property
    def prefix_keys(self) -> list[int]:
        """See `prompts.prefix_keys`."""
        if self._prefix_keys is None:
            self._prefix_keys = prompt_length.prefix_keys(self.body)
        return self._prefix_keys
