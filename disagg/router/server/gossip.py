"""Router processes that share engines tell each other what they know: the processes of one router
through their parent, other routers (`router.peers`) by POST /disagg/gossip.

A report goes out several times a second while there is something to tell, and nobody waits for it.
A router that cannot be reached is no problem for requests. The call is an operator's: routers show
each other an operator's key. It is not in the audit, as it is not a person's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated
from urllib.parse import urlsplit

import aiohttp
import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.router.api.errors import ApiError
from disagg.router.discovery import dns
from disagg.router.discovery.source import in_thread
from disagg.router.server import operators
from disagg.router.server.api_keys import KeyRing
from disagg.router.server.background import background
from disagg.router.server.models import Models
from disagg.router.server.peer_processes import PeerProcesses

logger = logging.getLogger(__name__)

PATH = "/disagg/gossip"
EVERY_S = 0.1
_ASK_S = 1.0
_LOOK_UP_S = 5.0
_MOST_BYTES = 4 << 20
_UNREACHABLE = (aiohttp.ClientError, TimeoutError, OSError)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    """What one router process tells another. router: random, new with each process."""

    router: Annotated[str, msgspec.Meta(min_length=8, max_length=64)]
    models: dict[str, msgspec.Raw]


_DECODE = msgspec.json.Decoder(_Message).decode


class Gossip:
    """Tells and hears. `keys`: one of an operator is shown to `settings.peers`. `tls`: to reach
    them by https."""

    def __init__(
        self,
        models: Models,
        settings: RouterSection,
        keys: Sequence[ApiKey],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._models, self._tls = models, tls
        self._key = next((key.value for key in keys if key.is_admin), None)
        self._peers = [_Peer(url) for url in settings.peers]
        self._has_siblings = settings.processes > 1
        self._id = secrets.token_hex(8)
        # So a peer that cannot be reached is in the log from the start.
        self._had_something = True

    @property
    def is_needed(self) -> bool:
        """Whether there is anybody to tell."""
        return self._has_siblings or bool(self._peers)

    def hear(self, message: bytes) -> bool:
        """Take what another process tells. Returns whether it is another one's. Raises
        msgspec.MsgspecError."""
        told = _DECODE(message)
        if told.router == self._id:
            return False
        for name, report in told.models.items():
            group = self._models.groups.get(name)
            if group is not None:
                group.service.hear(told.router, report)
        return True

    @asynccontextmanager
    async def running(self, siblings: Callable[[], PeerProcesses]) -> AsyncIterator[None]:
        """Tell the others, until the context ends. The groups must run."""
        if not self.is_needed:
            yield
            return
        for group in self._models.groups.values():
            group.service.share()
        headers = {} if self._key is None else {"authorization": f"Bearer {self._key}"}
        connector = aiohttp.TCPConnector(ssl=True if self._tls is None else self._tls, limit=0)
        async with (
            aiohttp.ClientSession(connector=connector, headers=headers, trust_env=False) as client,
            background(self._tell(client, siblings)),
        ):
            yield

    async def _tell(
        self, client: aiohttp.ClientSession, siblings: Callable[[], PeerProcesses]
    ) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            message = self._message()
            if message is None:
                continue
            if self._has_siblings:
                await siblings().gossip(message.decode())
            for peer in self._peers:
                peer.tell(client, message)

    def _message(self) -> bytes | None:
        """What there is to tell now; None if nothing, and nothing before."""
        reports = {name: group.service.report() for name, group in self._models.groups.items()}
        has_something = any(report is not None for report in reports.values())
        if not has_something and not self._had_something:
            return None
        self._had_something = has_something
        shown = {name: msgspec.Raw(report or b"{}") for name, report in reports.items()}
        return msgspec.json.encode(_Message(self._id, shown))


class _Peer:
    """Other routers at one URL: one, or with `dns://` one at each address of the name."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._urls = [] if url.startswith(dns.SCHEME) else [url.rstrip("/")]
        self._looked_up_at = float("-inf")
        self._telling: set[asyncio.Task[None]] = set()
        self._said: str | None = None
        self._lost: str | None = None

    def tell(self, client: aiohttp.ClientSession, message: bytes) -> None:
        """Send the message, unless the one before is still under way."""
        if not self._telling:
            task = asyncio.create_task(self._send(client, message))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _send(self, client: aiohttp.ClientSession, message: bytes) -> None:
        problem = await self._look_up()
        sent = (self._post(client, url, message) for url in self._urls)
        problems = [one for one in await asyncio.gather(*sent) if one is not None]
        problem = problems[0] if problems else problem
        if problem != self._said:
            self._said = problem
            if problem is not None:
                logger.warning("the router at %s is not told of loads: %s", self._url, problem)
            else:
                logger.info("the router at %s is told of loads", self._url)

    async def _post(self, client: aiohttp.ClientSession, url: str, message: bytes) -> str | None:
        """Returns why it was not taken, or None."""
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        try:
            async with client.post(
                url + PATH, data=message, timeout=timeout, allow_redirects=False
            ) as answer:
                return None if answer.status == 204 else f"it answers {answer.status}"
        except _UNREACHABLE as error:
            return str(error) or type(error).__name__

    async def _look_up(self) -> str | None:
        """Returns why a name cannot be looked up, or None. The routers that are known stay."""
        now = time.monotonic()
        if not self._url.startswith(dns.SCHEME) or now - self._looked_up_at < _LOOK_UP_S:
            return self._lost
        parts = urlsplit("http://" + self._url.removeprefix(dns.SCHEME))
        host, port = parts.hostname or "", parts.port or 80
        self._looked_up_at = now
        try:
            async with asyncio.timeout(_ASK_S):
                found = await in_thread(lambda: dns.resolve(host, port))
        except (OSError, UnicodeError) as error:
            self._lost = f"look-up failed ({str(error) or type(error).__name__})"
            return self._lost
        shown = (f"[{one}]" if ":" in one else one for one in sorted(found))
        self._urls = [f"http://{one}:{port}" for one in shown]
        self._lost = None if found else "the name has no address"
        return self._lost


def install(app: FastAPI, gossip: Gossip, keys: KeyRing) -> None:
    """Add the route, and `gossip` to the app's state."""
    app.state.gossip = gossip

    async def hear(request: Request) -> Response:
        try:
            operators.check(keys.check(request.scope), keys)
            message = await _body(request)
            try:
                is_anothers = gossip.hear(message)
            except (msgspec.MsgspecError, ValueError) as error:
                raise ApiError(400, f"not what a router of this version tells: {error}") from error
        except ApiError as error:
            return error.response()
        if is_anothers and gossip.is_needed:
            siblings: PeerProcesses = app.state.peer_processes
            await siblings.gossip(message.decode())
        return Response(status_code=204)

    app.router.routes.append(Route(PATH, hear, methods=["POST"]))


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise ApiError(413, f"the body is over {_MOST_BYTES} bytes")
    return bytes(body)
