"""The engines that the router knows, and how their URLs are read."""

from __future__ import annotations

import base64
import ipaddress
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, get_args
from urllib.parse import SplitResult, unquote, urlsplit

from disagg.config import KvEventsSection, Role
from disagg.errors import ConfigError

_EXAMPLE = "write it as http://HOST:8000"
_URL_CHARACTERS = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]*", re.ASCII)
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?", re.ASCII)
_CREDENTIALS = re.compile(r"^([^/?#]*://)?.*@")


@dataclass(frozen=True)
class EngineEndpoint:
    """One engine: its name (`prefill-0`; see `name_in`), its role, its OpenAI server's URL.

    A path of an API is appended to `url`, which ends without a slash. `authorization`: the header
    that this engine wants, in place of the key of all engines. `kv_events`, `kv_events_replay`: the
    ZMQ addresses at which it publishes its KV events, and sends them again.
    """

    name: str
    role: Role
    url: str
    authorization: str | None = field(default=None, repr=False)
    kv_events: str | None = None
    kv_events_replay: str | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to this engine has besides its own headers."""
        return {} if self.authorization is None else {"authorization": self.authorization}


def parse_endpoint(name: str, role: Role, text: str, setting: str) -> EngineEndpoint:
    """An engine at a URL that a user wrote. Raises ConfigError, which names `setting`.

    A user and a password become basic authorization. `/v1` at the end is left out, because it is
    part of the API's paths; any other path is a prefix of them.
    """
    try:
        parts = urlsplit(text)
        problem = _problem(text, parts)
    except ValueError:  # of brackets that do not match
        problem = "its host is no IPv6 address in brackets; " + _EXAMPLE
    if problem is not None:
        raise ConfigError(f"{setting}: {_without_secrets(text)!r} — {problem}")
    user, _, host = parts.netloc.rpartition("@")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    authorization = _basic(user) if user else None
    return EngineEndpoint(name, role, f"{parts.scheme}://{host}{path}", authorization)


def _problem(text: str, parts: SplitResult) -> str | None:
    """Why the text is no URL of an engine; None if it is one."""
    if not text.strip():
        return "is empty; " + _EXAMPLE
    if not _URL_CHARACTERS.fullmatch(text):
        return "has a space or another character that no URL has; write it as %XX, or remove it"
    if "://" not in text:
        return "has no scheme; " + _EXAMPLE
    if parts.scheme not in ("http", "https"):
        return f"{parts.scheme or 'this'} is no scheme of engines; write http:// or https://"
    if "?" in text or "#" in text:
        return "has a query or a fragment; end the URL before it"
    user, _, host = parts.netloc.rpartition("@")
    if ":" in unquote(user.partition(":")[0]):
        return "its user has a colon, which basic authorization cannot send; name another user"
    if not parts.hostname:
        return "names no host; " + _EXAMPLE
    if not _is_host(parts.hostname):
        return "its host is no name and no address; " + _EXAMPLE
    if host.endswith(":") or not _has_valid_port(parts):
        return "its port is no number from 1 to 65535; " + _EXAMPLE
    if {".", ".."} & {unquote(segment) for segment in parts.path.split("/")}:
        return "its path has . or ..; write the path that they lead to"
    return None


def _is_host(host: str) -> bool:
    if ":" not in host:
        return _HOST_NAME.fullmatch(host) is not None
    try:
        return bool(ipaddress.IPv6Address(host))
    except ValueError:
        return False


def _has_valid_port(parts: SplitResult) -> bool:
    try:
        return parts.port is None or parts.port > 0
    except ValueError:
        return False


def _basic(user: str) -> str:
    name, _, password = user.partition(":")
    pair = f"{unquote(name)}:{unquote(password)}".encode()
    return "Basic " + base64.b64encode(pair).decode()


def _without_secrets(text: str) -> str:
    """The URL without user, password and query."""
    shown = _CREDENTIALS.sub(r"\1<hidden>@", text)
    return re.sub(r"[?#].*", "?<hidden>", shown)


def with_events(engine: EngineEndpoint, sections: Mapping[str, KvEventsSection]) -> EngineEndpoint:
    """The engine with the addresses of its KV events, if its URL has any in these sections."""
    section = sections.get(engine.url, sections.get("*"))
    if engine.kv_events is not None or section is None:
        return engine
    name = urlsplit(engine.url).hostname or ""
    host = f"[{name}]" if ":" in name else name
    replay = section.replay_endpoint
    return replace(
        engine,
        kv_events=section.endpoint.replace("{host}", host),
        kv_events_replay=replay and replay.replace("{host}", host),
    )


class Away(NamedTuple):
    """A missing engine. `why`: for people to read. `returns`: whether it will serve again.
    `back_s`: about how many seconds until then, if that is known. `leaves`: it is going for good,
    and nobody misses it."""

    why: str
    returns: bool = True
    back_s: float | None = None
    leaves: bool = False


def name_in(deployment: str, name: str) -> str:
    """What the router calls this engine (`prefill-0`) of one of its deployments."""
    return f"{deployment}/{name}" if deployment else name


def deployment_of(name: str) -> str:
    """The deployment of the engine with this name; empty if the router has only one."""
    return name.rpartition("/")[0]


def role_of(name: str) -> str:
    """The role of the engine with this name: `prefill` of `prefill-0` and of `chat/prefill-0`."""
    return name.rpartition("/")[2].partition("-")[0]


class Topology:
    """The current engines, in the order given to the last `replace`."""

    def __init__(
        self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away] | None = None
    ) -> None:
        self.replace(engines, down or {})

    def of(self, role: Role) -> Sequence[EngineEndpoint]:
        """The engines of one role."""
        return self._by_role[role]

    def knows(self, role: Role) -> bool:
        """Whether the deployment has engines of this role, up or down."""
        missing = (name for name, away in self.down.items() if not away.leaves)
        return bool(self.of(role)) or any(role_of(name) == role for name in missing)

    def has(self, engine: EngineEndpoint) -> bool:
        """Whether this is an engine of now."""
        return engine in self.of(engine.role)

    def returning(self, role: Role) -> Mapping[str, Away]:
        """The missing engines of this role that will serve again, with the seconds left."""
        passed = time.monotonic() - self._told_at
        return {
            name: away if away.back_s is None else away._replace(back_s=away.back_s - passed)
            for name, away in self.down.items()
            if away.returns and role_of(name) == role
        }

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        """Use these engines from now on. `down`: those that are missing, by name."""
        self.engines, self.down = tuple(engines), down
        self._told_at = time.monotonic()
        self._by_role: dict[Role, Sequence[EngineEndpoint]] = {
            role: tuple(engine for engine in engines if engine.role == role)
            for role in get_args(Role)
        }
