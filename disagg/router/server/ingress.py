"""Where requests enter the router: their path is made the router's own, browsers' preflights are
answered, and completions take the short way.

It must never change a path that could then mean another one: a root path is taken off once, and so
is one slash at the end, from the bytes that the client sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from disagg.router.server.cors import Cors


class Ingress:
    """The outermost ASGI app. It sends a POST to a path of `direct` to that app, and all other
    requests to `app`.

    `root_path`: the prefix under which a proxy publishes the router. The proxy may pass it on or
    not.
    """

    def __init__(
        self,
        app: ASGIApp,
        direct: Mapping[str, ASGIApp],
        root_path: str = "",
        cors: Cors | None = None,
    ) -> None:
        self._app, self._direct, self._cors = app, direct, cors
        self._root, self._raw_root = root_path, root_path.encode()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._app
        if scope["type"] == "http":
            if self._root:
                self._take_root_off(scope)
            path: str = scope["path"]
            # Of "//" it would leave "/", which is another path.
            if path[-1:] == "/" and scope["raw_path"][-1:] == b"/" and len(path) > 2:
                scope["path"] = path = path[:-1]
                scope["raw_path"] = scope["raw_path"][:-1]
            if scope["method"] == "POST":
                app = self._direct.get(path, app)
            elif self._cors is not None and scope["method"] == "OPTIONS":
                app = self._cors.preflight(scope) or app
        return app(scope, receive, send)

    def _take_root_off(self, scope: Scope) -> None:
        raw: bytes = scope["raw_path"]
        if raw.startswith(self._raw_root) and raw[len(self._raw_root) :][:1] in (b"", b"/"):
            scope["raw_path"] = raw[len(self._raw_root) :] or b"/"
            scope["path"] = scope["path"][len(self._root) :] or "/"
