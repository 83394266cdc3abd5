"""Operators' calls about engines, as plain data that passes between router processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disagg.errors import ConfigError
from disagg.router.discovery.registry import Registry


class RegistryCalls:
    """The calls of `engines_api.py`, carried out by a registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def call(self, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `status` (of HTTP) and `content`; `content.error` is a message."""
        match name:
            case "add":
                try:
                    added = await self._registry.add(given["role"], given["url"])
                except ConfigError as error:
                    return _error(400, str(error))
                return {"status": 200, "content": added}
            case "remove":
                removed = await self._registry.remove(given["name"])
                if removed is None:
                    return _error(404, f"no engine is called {given['name'][:80]!r}")
                return {"status": 200, "content": removed}
        return {"status": 200, "content": {"engines": await self._registry.listed()}}


def _error(status: int, message: str) -> dict[str, Any]:
    return {"status": status, "content": {"error": message}}
