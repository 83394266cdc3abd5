"""Requests that are passed on as they are: which model's engines get them, or the router's own
answer where it takes the engines of all models.
"""

from __future__ import annotations

from urllib.parse import unquote

from fastapi import Request
from starlette.responses import JSONResponse

from disagg.router.api import model_name
from disagg.router.api.errors import ApiError
from disagg.router.engines.lora_adapters import LOAD, UNLOAD
from disagg.router.server import operators
from disagg.router.server.endpoint import Answer
from disagg.router.server.model_group import ModelGroup
from disagg.router.server.models import Models
from disagg.router.telemetry.access_log import Record

_LIST = "/v1/models"
# What every engine of disagg answers alike, whatever its model.
_ANY = frozenset(["/ping", "/version"])


class Forwarding:
    """Passes requests on for one app."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def forward(self, request: Request, data: bytes, record: Record) -> Answer:
        """The answer to a request at any path that is not paired. Raises `ApiError`."""
        group = self._models.only
        path = ""
        if group is None:
            path = unquote(operators.raw_path(request.scope))
            model = _named(request, data)
            if path == _LIST and model is None and request.method in ("GET", "HEAD"):
                return JSONResponse({"object": "list", "data": await self._models.listed()})
            group = await self._group(path, model, data)
            record.deployment = group.name
        target = operators.raw_target(request.scope)
        answer = await group.service.forward(request.method, target, data, request.headers, record)
        if path in (LOAD, UNLOAD):
            await self._models.changed()
        return answer

    async def _group(self, path: str, model: str | None, data: bytes) -> ModelGroup:
        if path in (LOAD, UNLOAD):
            return await self._group_of_adapter(path, model, model_name.adapter(data))
        if model is None and path in _ANY:
            return self._models.any_up()
        return await self._models.find(model)

    async def _group_of_adapter(self, path: str, model: str | None, name: str | None) -> ModelGroup:
        """The group of an adapter's base model. An adapter that is loaded tells its own base."""
        owner = self._models.known(name)
        if model is None and path == UNLOAD and owner is not None:
            return owner
        base = await self._models.find(model)
        if path == LOAD and owner is not None and owner is not base:
            raise ApiError(
                400, f"another model here has the name {name!r}; choose another", param="lora_name"
            )
        return base


def _named(request: Request, data: bytes) -> str | None:
    content_type = request.headers.get("content-type", "")
    return model_name.named(data, content_type, request.scope["query_string"])
