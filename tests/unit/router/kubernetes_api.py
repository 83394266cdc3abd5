"""A stand-in for the Kubernetes API server: pods, lists with pages, and watches, over HTTPS.

As the real one does it: each change has a resource version; a watch begins behind a version and
sends the changes as lines of JSON; versions that are too old get 410, in the list's pages as a
status and in a watch as an ERROR event; a pod that no longer fits a selector is DELETED for its
watchers; a watch ends after `timeoutSeconds`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Pod = dict[str, Any]
NAMESPACE = "llm"


def fits(pod: Pod, selector: str) -> bool:
    """Equality selectors alone."""
    labels = pod["metadata"]["labels"]
    return all(
        labels.get(key) == value
        for key, _, value in (one.partition("=") for one in selector.split(",") if one)
    )


def pod(name: str, labels: dict[str, str], ip: str | None, *, ready: bool = True) -> Pod:
    """As `kubectl get pod -o json` shows it, with what the router must not stumble over."""
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "Ready", "status": "True" if ready else "False"},
    ]
    status: dict[str, Any] = {"phase": "Running" if ip else "Pending", "conditions": conditions}
    if ip:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "10.9.9.9"}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": labels, "uid": f"uid-{name}"},
        "spec": {"containers": [{"name": "vllm", "env": [{"name": "X", "value": "y" * 90_000}]}]},
        "status": status,
    }


@dataclass
class ApiServer:
    """`token`: that requests must send. `page`: most pods in one answer. `refuses`: a status for
    every request. `expired`: versions below get 410."""

    token: str | None = None
    page: int = 500
    refuses: int | None = None
    expired: int = 0
    bookmarks: bool = False
    pods: dict[str, Pod] = field(default_factory=dict, repr=False)
    changes: list[tuple[int, Pod | None, Pod]] = field(default_factory=list, repr=False)
    bookmarked: list[str] = field(default_factory=list, repr=False)
    lists: int = 0
    watches: list[dict[str, str]] = field(default_factory=list)
    version: int = 100
    url: str = ""

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._changed = asyncio.Condition()
        self._cut = asyncio.Event()
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._pods)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        site = web.TCPSite(self.runner, "127.0.0.1", port, ssl_context=tls, reuse_address=True)
        await site.start()
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self.cut()
        await self.runner.cleanup()

    async def put(self, new: Pod) -> None:
        """Create or change a pod."""
        name = new["metadata"]["name"]
        await self._change(self.pods.get(name), new)
        self.pods[name] = self.changes[-1][2]

    async def delete(self, name: str) -> None:
        await self._change(self.pods.pop(name), None)

    async def cut(self) -> None:
        """Break all watches off."""
        self._cut.set()
        self._cut = asyncio.Event()

    async def expire(self) -> None:
        """Forget all versions until now, and break the watches off."""
        self.version += 1
        self.expired = self.version
        await self.cut()

    async def _change(self, before: Pod | None, after: Pod | None) -> None:
        self.version += 1
        shown = copy.deepcopy(after or before)
        assert shown is not None
        shown["metadata"]["resourceVersion"] = str(self.version)
        self.changes.append((self.version, before, shown if after else {**shown, "gone": True}))
        async with self._changed:
            self._changed.notify_all()

    async def _pods(self, request: web.Request) -> web.StreamResponse:
        if self.refuses is not None:
            return _status(self.refuses, "told to")
        if self.token and request.headers.get("authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if request.match_info["namespace"] != NAMESPACE:
            return _status(403, "pods is forbidden")
        query = dict(request.query)
        if query.get("watch") == "true":
            self.watches.append(query)
            return await self._watch(request, query)
        self.lists += 1
        return self._list(query)

    def _list(self, query: dict[str, str]) -> web.Response:
        begin, _, version = query.get("continue", "").partition("@")
        if version and int(version) < self.expired:
            return _status(410, "The provided continue parameter is too old")
        found = [one for one in self.pods.values() if fits(one, query["labelSelector"])]
        first, limit = int(begin or 0), min(self.page, int(query["limit"]))
        metadata = {"resourceVersion": str(self.version)}
        if len(found) > first + limit:
            metadata["continue"] = f"{first + limit}@{self.version}"
        items = found[first : first + limit]
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, query: dict[str, str]) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        cut = self._cut
        async for event in self._events(query, cut):
            data = json.dumps(event).encode() + b"\n"
            for at in range(0, len(data), 60_000):  # an event comes in pieces
                await answer.write(data[at : at + 60_000])
        if cut.is_set():
            await answer.write(b'{"type": "MODIFIED", "obj')  # in mid-event
            assert request.transport is not None
            request.transport.abort()
        return answer

    async def _events(
        self, query: dict[str, str], cut: asyncio.Event
    ) -> AsyncIterator[dict[str, Any]]:
        sent, selector = int(query["resourceVersion"]), query["labelSelector"]
        if sent < self.expired:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            yield {"type": "ERROR", "object": gone}
            return
        while not cut.is_set():
            for version, before, shown in list(self.changes):
                if version <= sent:
                    continue
                sent = version
                fitted = before is not None and fits(before, selector)
                is_gone = shown.get("gone", False) or not fits(shown, selector)
                if is_gone and fitted:
                    yield {"type": "DELETED", "object": shown}
                elif not is_gone:
                    yield {"type": "MODIFIED" if fitted else "ADDED", "object": shown}
            if self.bookmarks:
                metadata = {"resourceVersion": str(self.version)}
                self.bookmarked.append(metadata["resourceVersion"])
                yield {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": metadata}}
            await self._wait(cut)

    async def _wait(self, cut: asyncio.Event) -> None:
        async def changed() -> None:
            async with self._changed:
                await self._changed.wait()

        waits = [asyncio.create_task(changed()), asyncio.create_task(cut.wait())]
        try:
            await asyncio.wait(waits, timeout=0.2, return_when="FIRST_COMPLETED")
        finally:
            for one in waits:
                one.cancel()


def _status(code: int, message: str) -> web.Response:
    content = {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}
    return web.json_response(content, status=code)
