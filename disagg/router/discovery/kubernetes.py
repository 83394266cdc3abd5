"""Engines in Kubernetes pods, found by their labels.

One list and one watch for each role, as Kubernetes describes for its clients ("Efficient detection
of changes"): the list gives a resource version, from which the watch goes on. After a lost
connection the watch goes on from the last version seen. If the server does not have that version
any more (410), everything is listed anew. A pod is an engine while it is ready, has an address, and
is not terminating. While the API server cannot be reached, the known engines stay.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from disagg import keepalive
from disagg.config import KubernetesSection, Role
from disagg.errors import ConfigError
from disagg.router.discovery.source import Report, SaidOnce, in_thread
from disagg.router.topology import EngineEndpoint

_OWN = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_PAGE = 500  # pods in one answer to a list
_LIST_S = 30.0
_WATCH_S = 300  # then the server ends a watch, and the next one begins
_LATE_S = 30.0  # for a server that does not
_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
_LONGEST_EVENT = 16 << 20


@dataclass(frozen=True)
class Cluster:
    """Where the API server is, and how it and the router know each other."""

    api: str
    namespace: str
    port: int
    token_file: Path | None
    tls: ssl.SSLContext | None

    def pods(self) -> str:
        """The URL of the namespace's pods."""
        return f"{self.api}/api/v1/namespaces/{self.namespace}/pods"

    async def headers(self) -> dict[str, str]:
        """With the token of now: kubelets replace it each hour. Raises OSError."""
        if self.token_file is None:
            return {}
        token = (await in_thread(self.token_file.read_text)).strip()
        return {"authorization": f"Bearer {token}"}


def cluster(section: KubernetesSection, setting: str, own: Path = _OWN) -> Cluster:
    """The cluster that a section names; what it leaves out, the router's own pod tells. `own`: the
    folder with the pod's credentials. Raises ConfigError."""
    api, is_own = section.api, section.api is None
    if api is None:
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                f"{setting}.api: empty, and this is no pod (no KUBERNETES_SERVICE_HOST) — set the "
                "URL of the API server"
            )
        api = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    namespace = section.namespace
    if namespace is None:
        try:
            namespace = (own / "namespace").read_text().strip()
        except OSError as error:
            raise ConfigError(
                f"{setting}.namespace: empty, and this is no pod — name the pods' namespace"
            ) from error
    token_file = section.token_file or (own / "token" if is_own else None)
    ca_file = section.ca_file or (own / "ca.crt" if is_own else None)
    if token_file is not None and not api.startswith("https://"):
        raise ConfigError(
            f"{setting}.token_file: {str(token_file)!r} — a token must not go over http; set "
            "api to https://, or remove the token"
        )
    if token_file is not None and not os.access(token_file, os.R_OK):
        raise ConfigError(f"{setting}.token_file: {str(token_file)!r} — make it readable")
    tls = None
    if ca_file is not None:
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:  # of a file that cannot be read, or holds no certificate
            raise ConfigError(
                f"{setting}.ca_file: {str(ca_file)!r} — {error.strerror or error}; name a PEM file"
            ) from error
    return Cluster(api.rstrip("/"), namespace, section.port, token_file, tls)


class Pods:
    """The pods of one role. `labels`: a label selector."""

    def __init__(self, where: Cluster, role: Role, labels: str) -> None:
        self._cluster, self._role, self._labels = where, role, labels
        self.name = f"{role} kubernetes {where.namespace} {labels}"
        self.roles = frozenset([role])
        self._problems = SaidOnce(self.name)
        self._engines: dict[str, EngineEndpoint] = {}  # by the pod's name
        self._version: str | None = None  # None: list
        self._failures = 0

    async def run(self, report: Report) -> None:
        """Report the engines of the pods that are ready."""
        connector = aiohttp.TCPConnector(
            ssl=True if self._cluster.tls is None else self._cluster.tls,
            socket_factory=_keepalive_socket,
            force_close=True,
        )
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as client:
            while True:
                try:
                    if self._version is None:
                        await self._list(client, report)
                    await self._watch(client, report)
                except _Gone:
                    self._version = None
                    self._failures = max(self._failures, 2)  # a list is dear
                except _Refused as error:
                    self._failed(str(error))
                    # Whatever the version has to do with it: a list tells what is wrong.
                    self._version = None
                except (OSError, aiohttp.ClientError, msgspec.MsgspecError, LookupError) as error:
                    self._failed(f"{error or type(error).__name__}")
                pause = min(_PAUSE_S * 2 ** min(self._failures, 10), _LONGEST_PAUSE_S)
                await asyncio.sleep(pause * random.uniform(0.8, 1.2))

    def _failed(self, words: str) -> None:
        self._failures += 1
        self._problems.problem(words)

    def _worked(self) -> None:
        self._failures = 0
        self._problems.over()

    async def _list(self, client: aiohttp.ClientSession, report: Report) -> None:
        params = {"labelSelector": self._labels, "limit": str(_PAGE)}
        found: dict[str, EngineEndpoint] = {}
        while True:
            headers, timeout = await self._cluster.headers(), aiohttp.ClientTimeout(total=_LIST_S)
            async with client.get(
                self._cluster.pods(),
                params=params,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                await _check(answer)
                page = msgspec.json.decode(await answer.read())
            for pod in page["items"]:
                engine = self._engine(pod)
                if engine is not None:
                    found[pod["metadata"]["name"]] = engine
            params["continue"] = page["metadata"].get("continue", "")
            if not params["continue"]:
                break
        self._engines, self._version = found, page["metadata"]["resourceVersion"]
        self._worked()
        report(list(found.values()))

    async def _watch(self, client: aiohttp.ClientSession, report: Report) -> None:
        """Until the server ends the watch. Raises _Gone if the version is too old."""
        assert self._version is not None
        params = {
            "labelSelector": self._labels,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(_WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=_WATCH_S + _LATE_S, sock_connect=_LIST_S)
        async with client.get(
            self._cluster.pods(),
            params=params,
            headers=await self._cluster.headers(),
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            await _check(answer)
            self._worked()
            async for line in _lines(answer.content):
                event = msgspec.json.decode(line)
                if self._take(event["type"], event["object"]):
                    report(list(self._engines.values()))

    def _take(self, kind: str, pod: dict[str, Any]) -> bool:
        """One event of a watch; whether the engines changed. Raises _Gone or _Refused."""
        if kind == "ERROR":
            if pod.get("code") == 410:
                raise _Gone
            raise _Refused(str(pod.get("message", "the watch failed"))[:300])
        self._version = pod["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        name = pod["metadata"]["name"]
        before = self._engines.pop(name, None)
        engine = None if kind == "DELETED" else self._engine(pod)
        if engine is not None:
            self._engines[name] = engine
        return engine != before

    def _engine(self, pod: dict[str, Any]) -> EngineEndpoint | None:
        """The engine in this pod; None if it is not ready, or terminating."""
        status = pod.get("status", {})
        conditions = status.get("conditions") or ()
        is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
        address = status.get("podIP")
        if not is_ready or not address or "deletionTimestamp" in pod["metadata"]:
            return None
        host = f"[{address}]" if ":" in address else address
        return EngineEndpoint("", self._role, f"http://{host}:{self._cluster.port}")


class _Gone(Exception):
    """The server no longer has the version from which a watch should go on."""


class _Refused(Exception):
    """The server answers, but not with what was asked."""


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 410:
        raise _Gone
    if answer.status == 200:
        return
    try:
        words = str(msgspec.json.decode(await answer.read())["message"])[:300]
    except (msgspec.MsgspecError, LookupError, TypeError):
        words = "no words of Kubernetes'; is this the API server?"
    raise _Refused(f"the API server answers {answer.status}: {words!r}")


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a watch. The stream's own reader refuses those over 64 KiB, as pods may have."""
    rest = b""
    async for data in stream.iter_any():
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            if line.strip():
                yield line
        if len(rest) > _LONGEST_EVENT:
            raise _Refused(f"an event is over {_LONGEST_EVENT} bytes")


def _keepalive_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    sock = socket.socket(family, kind, protocol)
    keepalive.watch(sock)
    return sock
