"""Parses `kv_connector_extra_config` for all of our connectors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from disagg.errors import ConfigError
from disagg.redaction import hidden

S = TypeVar("S", bound=BaseModel)


def parse(
    settings: type[S], extra_config: dict[str, Any], hints: Mapping[str, str] | None = None
) -> S:
    """The settings; raises `ConfigError` with one line per wrong key.

    hints: key -> what to do about it; by default the line lists all keys.
    """
    try:
        return settings.model_validate(extra_config)
    except ValidationError as error:
        keys = f"keys: {', '.join(settings.model_fields)}"
        lines = []
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"]))
            shown = hidden(problem["input"], key)
            hint = (hints or {}).get(key, keys)
            lines.append(f"kv_connector_extra_config.{key}: {shown!r} — {problem['msg']}; {hint}")
        raise ConfigError(lines) from error
