"""`disagg dashboard`: takes the dashboard to a running Grafana, or writes the files of a new one.

Nothing that is there is lost unasked: over HTTP the dashboard of our own uid is replaced, and a
folder's files are only those that this wrote or that were not there.
"""

from __future__ import annotations

import json
import os
import ssl
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import yaml

from disagg.dashboards.grafana import FILE, UID
from disagg.errors import ConfigError, DisaggError

ANSWER_S = 10.0
HEAD = "# Written by `disagg dashboard --folder`."
_MARKS = (HEAD, f'{{\n "uid": "{UID}",')  # how our files begin
# Where Grafana's packages and images look for what is provisioned.
PROVISIONING = "/etc/grafana/provisioning"
_REFUSED = {
    401: "the token is not one of this Grafana's; name a variable with one in --token-env",
    403: "the token may not write dashboards; give its service account the role Editor",
    404: "there is no Grafana's API; write the address that a browser shows, without a path of its "
    "pages",
    412: "a dashboard that was provisioned from files cannot be replaced; change its files",
}


def send(url: str, token_env: str | None, ca: Path | None) -> str:
    """Create or replace the dashboard over Grafana's HTTP API; returns the address of its page.

    Without a token only a Grafana that lets everybody write takes it. Raises ConfigError or
    DisaggError.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"--url: {url!r} — not one of a Grafana; write http://HOST:3000")
    headers = {"content-type": "application/json", **_authorization(token_env)}
    content = {"dashboard": json.loads(FILE.read_text("utf-8")), "overwrite": True}
    root = url.rstrip("/")
    request = Request(f"{root}/api/dashboards/db", json.dumps(content).encode(), headers)
    try:
        with urlopen(request, timeout=ANSWER_S, context=_trusting(ca)) as answer:
            answered: dict[str, Any] = json.load(answer)
            page = str(answered["url"])
    except HTTPError as error:
        why = _REFUSED.get(error.code) or _message(error)
        raise DisaggError(f"{url} answers {error.code}: {why}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise DisaggError(f"{url}: {reason or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DisaggError(f"{url}: this is no answer of a Grafana's") from error
    origin = urlsplit(url)
    return f"{origin.scheme}://{origin.netloc}{page}"  # the page's path has Grafana's own root


def write(folder: Path, router: str, prometheus: str) -> list[Path]:
    """Write what Prometheus and Grafana read at their start; returns the files written.

    `prometheus.yml` has the router as its target; `provisioning/` is for Grafana's folder of that
    name. Raises ConfigError.
    """
    contents = files(router, prometheus)
    foreign = [path for name in contents if (path := folder / name).exists() and not _ours(path)]
    if foreign:
        raise ConfigError(
            [f"--folder: {path} is there and not of this command; remove it" for path in foreign]
        )
    try:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--folder: {str(folder)!r} — {error.strerror}; name one that can be written"
        ) from error
    return [folder / name for name in contents]


def files(router: str, prometheus: str) -> dict[str, str]:
    """Their text, by path. Raises ConfigError."""
    target = urlsplit(router)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise ConfigError(f"--router: {router!r} — not one of a router; write http://HOST:PORT")
    scrape = {
        "job_name": "disagg",
        "scrape_interval": "5s",
        "scheme": target.scheme,
        "metrics_path": f"{target.path.rstrip('/')}/metrics",
        "static_configs": [{"targets": [target.netloc]}],
    }
    datasource = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "isDefault": True,
        "jsonData": {"timeInterval": scrape["scrape_interval"]},
    }
    provider = {
        "name": "disagg",
        "type": "file",
        "options": {"path": f"{PROVISIONING}/dashboards"},
    }
    return {
        "prometheus.yml": _yaml({"scrape_configs": [scrape]}),
        "provisioning/datasources/disagg.yaml": _yaml(
            {"apiVersion": 1, "datasources": [datasource]}
        ),
        "provisioning/dashboards/disagg.yaml": _yaml({"apiVersion": 1, "providers": [provider]}),
        "provisioning/dashboards/disagg.json": FILE.read_text("utf-8"),
    }


def _yaml(content: dict[str, Any]) -> str:
    return f"{HEAD}\n{yaml.safe_dump(content, sort_keys=False)}"


def _ours(path: Path) -> bool:
    try:
        there = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return there.startswith(_MARKS)


def _authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise ConfigError(f"--token-env: {token_env!r} — this variable holds no token; export it")
    return {"authorization": f"Bearer {token}"}


def _trusting(ca: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ConfigError(
            f"--ca: {str(ca)!r} — {error.strerror or error}; name a PEM file"
        ) from error


def _message(error: HTTPError) -> str:
    try:
        return str(json.load(error)["message"])
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)
