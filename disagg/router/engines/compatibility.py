"""Which engines can hand off KV to each other, by the fields that each engine reports.

The workers compare their whole fingerprints when they connect, and refuse a mismatch. This module
only keeps requests away from pairings that cannot work. A field that an engine does not report
counts as a match.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from disagg.router.topology import EngineEndpoint

logger = logging.getLogger(__name__)

_LONGEST_SHOWN = 200
SCHEDULING = "scheduling_policy"
# Fields that may differ between the two engines of a pairing.
_OWN = {"max_model_len", "max_tokens", "chats", SCHEDULING}


class Compatibility:
    """The fields that each engine reported last."""

    def __init__(self) -> None:
        self._reports: dict[str, Mapping[str, str]] = {}
        self._fit: dict[tuple[str, str], bool] = {}  # a cache, since each request asks

    def knows(self, engine: EngineEndpoint) -> bool:
        """Whether the engine was asked since it came up."""
        return engine.name in self._reports

    def note(self, engine: EngineEndpoint, fields: Mapping[str, str]) -> None:
        """Store the fields that the engine reports; logs each mismatch with another engine."""
        self._reports[engine.name] = fields
        self._fit.clear()
        for name, others in self._reports.items():
            key = _mismatch(fields, others)
            if key is not None:
                logger.warning(
                    "%s and %s are not paired: %r is %r and %r",  # %r escapes engines' words
                    engine.name,
                    name,
                    key[:_LONGEST_SHOWN],
                    fields[key][:_LONGEST_SHOWN],
                    others[key][:_LONGEST_SHOWN],
                )

    def said(self, engine: EngineEndpoint) -> Mapping[str, str]:
        """The fields that the engine reported; empty if it was not asked yet, or reports none."""
        return self._reports.get(engine.name, {})

    def forget(self, engine: EngineEndpoint) -> None:
        """The engine is gone. One that comes back under its name must be asked again."""
        self._reports.pop(engine.name, None)
        self._fit.clear()

    def fit(self, one: EngineEndpoint, other: EngineEndpoint) -> bool:
        """Whether no reported field differs between these engines."""
        pair = (one.name, other.name)
        fit = self._fit.get(pair)
        if fit is None:
            fit = self._fit[pair] = _mismatch(self.said(one), self.said(other)) is None
        return fit


def _mismatch(one: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    both = (one.keys() & other.keys()) - _OWN
    return next((key for key in both if one[key] != other[key]), None)
