"""Which engines serve which model. A request goes to the engines of the model that it names.

A model's own name is in the settings, so it is known while its engines are down. Other names, such
as those of LoRA adapters, are read from the engines: at the start, every few seconds, and before a
request is refused because nobody has its model. The names that engines report are believed as far
as no setting and no model before has them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec

from disagg.config import ModelRouteSection, Role
from disagg.errors import ConfigError
from disagg.router.api.errors import ApiError
from disagg.router.server.background import background
from disagg.router.server.model_group import ModelGroup
from disagg.router.telemetry.engine_metrics import Cached
from disagg.router.topology import Away, EngineEndpoint, deployment_of, name_in, parse_endpoint

logger = logging.getLogger(__name__)

_ASK_S = 1.0
_REFRESH_S = 10.0
_TRIED = 2  # engines of a group, one after the other
_LONGEST = 4 << 20  # bytes of an engine's list
_MOST_SHOWN = 20  # names in an error
_LONGEST_NAME = 256
_UNNAMED = (
    "several models are served here, and the request names none: add model to the body, or "
    "?model=NAME to the path"
)

Item = Mapping[str, Any]
"""A model as an engine describes it in the answer of `/v1/models`."""


class _Listed(msgspec.Struct):
    data: list[dict[str, Any]]


_NO_LIST = (
    aiohttp.ClientError,
    TimeoutError,
    ConnectionError,
    msgspec.MsgspecError,
    ValueError,
    RecursionError,
)
_LISTS = msgspec.json.Decoder(_Listed)


class Models:
    """The models of one router. `only`: the group, if its settings name no models; it gets every
    request, whatever model that names."""

    def __init__(self, groups: Sequence[ModelGroup]) -> None:
        self.groups = {group.name: group for group in groups}
        self.only = groups[0] if groups[0].name == "" else None
        self._items: dict[str, Sequence[Item]] = {}
        """What the engines of a group listed last, by the group's name."""
        self._own = {group.model: group for group in groups}
        self._names: Mapping[str, ModelGroup] = self._own
        self._listing = Cached(self._read_lists)
        self._lacking: set[str] = set()
        """The groups whose engines do not list the model of that name."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the names current. The groups must run."""
        if self.only is not None:
            yield
            return
        async with background(self._keep_current()):
            yield

    # ---- engines of all groups -----------------------------------------------------------------

    @property
    def engines(self) -> Sequence[EngineEndpoint]:
        """The engines of all models."""
        if self.only is not None:
            return self.only.topology.engines
        groups = self.groups.values()
        return tuple(engine for group in groups for engine in group.topology.engines)

    @property
    def down(self) -> Mapping[str, Away]:
        """The missing engines of all models, by name."""
        groups = self.groups.values()
        return {name: away for one in groups for name, away in one.topology.down.items()}

    @property
    def hears_caches(self) -> bool:
        """Whether the router knows what the engines' caches hold, of any model."""
        return any(group.hears_caches for group in self.groups.values())

    @property
    def shares_caches(self) -> bool:
        """Whether an engine may fetch from another engine's cache, of any model."""
        return any(group.shares_caches for group in self.groups.values())

    def problem(self, engine: EngineEndpoint) -> str | None:
        """Why an engine is not up."""
        return self._group_of(engine.name).health.problem(engine)

    def metrics_are_odd(self, engine: str, problem: str) -> None:
        """Something of this engine's metrics was left out."""
        self._group_of(engine).metrics.engine_metrics_are_odd(engine, problem)

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Use these engines from now on; see `ModelGroup.replace`. Their names say whose they
        are."""
        if self.only is not None:
            self.only.replace(engines, down)
            return
        for name, group in self.groups.items():
            group.replace(
                [engine for engine in engines if deployment_of(engine.name) == name],
                {key: away for key, away in down.items() if deployment_of(key) == name},
            )

    def needed(self) -> dict[str, int]:
        """How much each engine is needed for, by name; see `Legs.running`."""
        groups = self.groups.values()
        return {name: count for one in groups for name, count in one.service.running().items()}

    def _group_of(self, engine: str) -> ModelGroup:
        return self.only or self.groups[deployment_of(engine)]

    # ---- names of models -----------------------------------------------------------------------

    def known(self, model: object) -> ModelGroup | None:
        """The group with this model, as far as its name was read already."""
        if self.only is not None:
            return self.only
        return self._names.get(model) if isinstance(model, str) else None

    async def find(self, model: object) -> ModelGroup:
        """The group with this model. Raises `ApiError` 404 if no engine that answers has it, 400 if
        it is no name."""
        if model is None:
            raise ApiError(400, f"{_UNNAMED}; {self._choice()}", param="model")
        if not isinstance(model, str):
            raise ApiError(400, f"model must be a string; {self._choice()}", param="model")
        group = self.known(model)
        if group is None:
            await self._listing.get()
            group = self.known(model)
        if group is None:
            name = model[:_LONGEST_NAME]
            raise ApiError(
                404, f"The model `{name}` does not exist; {self._choice()}", param="model"
            )
        return group

    def any_up(self) -> ModelGroup:
        """A group whose engines answer, if there is one."""
        groups = list(self.groups.values())
        up = (one for one in groups if one.health.usable(one.topology.of("decode")))
        return next(up, groups[0])

    async def listed(self) -> Sequence[Item]:
        """The models that the engines of all groups list, at most a second old."""
        items = await self._listing.get()
        shown: dict[str, Item] = {}
        for name, group in self.groups.items():
            for item in items.get(name, ()):
                if self._names.get(item["id"]) is group:
                    shown.setdefault(item["id"], item)
        return list(shown.values())

    async def changed(self) -> None:
        """An adapter was loaded or unloaded: read the names anew."""
        if self.only is None:
            await self._listing.get(fresh=True)

    def _choice(self) -> str:
        names = sorted(self._names)
        more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
        return f"there are: {', '.join(names[:_MOST_SHOWN])}{more}"

    # ---- what engines list ---------------------------------------------------------------------

    async def _keep_current(self) -> None:
        while True:
            await self._listing.get()
            await asyncio.sleep(_REFRESH_S)

    async def _read_lists(self) -> Mapping[str, Sequence[Item]]:
        """The lists of the groups that answer."""
        groups = self.groups.values()
        answers = await asyncio.gather(*map(_list_of, groups))
        found = {
            group.name: items
            for group, items in zip(groups, answers, strict=True)
            if items is not None
        }
        # A group that is down keeps its names: its clients get 503, not 404.
        self._items |= found
        names = dict(self._own)
        for name, items in self._items.items():
            for item in items:
                names.setdefault(item["id"], self.groups[name])
        self._names = names
        for name, items in found.items():
            self._note(self.groups[name].model, [item["id"] for item in items])
        return found

    def _note(self, name: str, listed: Sequence[str]) -> None:
        """Log once if the engines of a group do not serve its model."""
        if name in listed:
            self._lacking.discard(name)
        elif name not in self._lacking:
            self._lacking.add(name)
            logger.warning(
                "engines of the model %r list %s, so they will refuse its requests; correct "
                "models.name, or start them with --served-model-name",
                name,
                ", ".join(repr(each) for each in listed[:_MOST_SHOWN]) or "none",
            )


async def _list_of(group: ModelGroup) -> Sequence[Item] | None:
    """What a decode engine of this group lists; None if none answers in time."""
    for engine in group.health.usable(group.topology.of("decode"))[:_TRIED]:
        items = await _ask(group.service.client, engine)
        if items is not None:
            return items
    return None


async def _ask(client: aiohttp.ClientSession, engine: EngineEndpoint) -> Sequence[Item] | None:
    timeout, pieces, size = aiohttp.ClientTimeout(total=_ASK_S), list[bytes](), 0
    try:
        async with client.get(
            f"{engine.url}/v1/models", timeout=timeout, headers=engine.headers
        ) as answer:
            if answer.status != 200:
                return None
            async for piece in answer.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > _LONGEST:
                    return None
        items = _LISTS.decode(b"".join(pieces)).data
    except _NO_LIST:
        return None
    return [item for item in items if _is_named(item)]


def _is_named(item: Item) -> bool:
    name = item.get("id")
    return isinstance(name, str) and 0 < len(name) <= _LONGEST_NAME


def endpoints(models: Sequence[ModelRouteSection]) -> list[EngineEndpoint]:
    """The engines that a router's file names for several models. Raises ConfigError."""
    for number, model in enumerate(models):
        if not model.engines.decode:
            raise ConfigError(
                f"models.{number}.engines.decode: empty — name the URL of a decode engine"
            )
    roles: tuple[Role, ...] = ("prefill", "decode")
    return [
        parse_endpoint(
            name_in(model.name, f"{role}-{place}"), role, url, f"models.{number}.engines.{role}"
        )
        for number, model in enumerate(models)
        for role in roles
        for place, url in enumerate(getattr(model.engines, role))
    ]
