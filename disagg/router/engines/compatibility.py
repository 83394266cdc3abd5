"""Which engines can hand over to which, by what they say of themselves.

The workers compare everything when they meet; this spares requests the pairings that cannot work.
What an engine does not say fits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

# What an engine says of itself alone.
_OWN = {"max_model_len", "max_tokens", "chats"}


class Compatibility:
    """What the engines said last."""

    def __init__(self) -> None:
        self._said: dict[str, Mapping[str, str]] = {}
        self._fit: dict[tuple[str, str], bool] = {}  # each request asks

    def knows(self, engine: EngineEndpoint) -> bool:
        """Whether it was asked since it came up."""
        return engine.name in self._said

    def note(self, engine: EngineEndpoint, fields: Mapping[str, str]) -> None:
        """What it says; a misfit with the others is told once."""
        self._said[engine.name] = fields
        self._fit.clear()
        for name, others in self._said.items():
            key = _misfit(fields, others)
            if key is not None:
                logger.warning(
                    "%s and %s are not paired: %s is %r and %r",
                    engine.name,
                    name,
                    key,
                    fields[key],
                    others[key],
                )

    def said(self, engine: EngineEndpoint) -> Mapping[str, str]:
        """By this engine; empty if it was not asked yet, or says nothing."""
        return self._said.get(engine.name, {})

    def forget(self, engine: EngineEndpoint) -> None:
        """It is gone; what comes back must be asked."""
        self._said.pop(engine.name, None)
        self._fit.clear()

    def fit(self, one: EngineEndpoint, other: EngineEndpoint) -> bool:
        """Whether nothing is known against this pairing."""
        pair = (one.name, other.name)
        fit = self._fit.get(pair)
        if fit is None:
            fit = self._fit[pair] = _misfit(self.said(one), self.said(other)) is None
        return fit


def _misfit(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    both = (one.keys() & other.keys()) - _OWN
    return next((key for key in both if one[key] != other[key]), None)
