"""`disagg dashboard`: sends the dashboard to a running Grafana, or writes the files for a new one.

It must never overwrite anything else. Over HTTP it replaces only the dashboard with our uid. In a
folder it writes only files that it wrote before or that do not exist.
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
_MARKS = (HEAD, f'{{\n "uid": "{UID}",')  # the first characters of our files
# The provisioning folder of Grafana's packages and images.
PROVISIONING = "/etc/grafana/provisioning"
_REFUSED = {
    401: "the token is not valid for this Grafana; name a variable with a valid one in --token-env",
    403: "the token may not write dashboards; give its service account the role Editor",
    404: "no Grafana API at this URL; give Grafana's root URL, without the path of a page",
    412: "a dashboard that was provisioned from files cannot be replaced; change its files",
}


def send(url: str, token_env: str | None, ca: Path | None) -> str:
    """Create or replace the dashboard through Grafana's HTTP API. Returns the URL of its page.

    Without a token it works only if Grafana lets everybody write. Raises ConfigError or
    DisaggError.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"--url: {url!r} — not a Grafana's URL; write http://HOST:3000")
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
        raise DisaggError(f"{url} returned {error.code}: {why}") from error
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise DisaggError(f"{url}: {reason or type(error).__name__}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DisaggError(f"Not a Grafana: {url} returned an unexpected answer") from error
    origin = urlsplit(url)
    return f"{origin.scheme}://{origin.netloc}{page}"  # `page` includes Grafana's root path


def write(folder: Path, router: str, prometheus: str) -> list[Path]:
    """Write the configuration files of Prometheus and Grafana. Returns the paths written.

    `prometheus.yml` has the router as its target. `provisioning/` belongs into Grafana's folder of
    that name. Raises ConfigError.
    """
    contents = files(router, prometheus)
    foreign = [path for name in contents if (path := folder / name).exists() and not _ours(path)]
    if foreign:
        raise ConfigError(
            [
                f"--folder: {path} exists and was not written by this command; remove it"
                for path in foreign
            ]
        )
    try:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, "utf-8")
    except OSError as error:
        raise ConfigError(
            f"--folder: {str(folder)!r} — {error.strerror}; name a writable folder"
        ) from error
    return [folder / name for name in contents]


def files(router: str, prometheus: str) -> dict[str, str]:
    """The text of each file, by path. Raises ConfigError."""
    target = urlsplit(router)
    if target.scheme not in ("http", "https") or not target.hostname:
        raise ConfigError(f"--router: {router!r} — not a router's URL; write http://HOST:PORT")
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
