"""Whom the router believes about who its client is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from unit.router.conftest import AS_OPERATOR, Setup, wait_for

from disagg.config import ProxiesSection
from disagg.router.server.proxies import TrustedProxies
from disagg.testing.http import client

Make = Callable[..., Setup]
NETWORKS = ["10.0.0.0/8", "2001:db8:1::/48", "127.0.0.1"]
BODY = {"model": "m", "prompt": "x"}


def client_of(header: Any = "x-forwarded", **headers: str) -> tuple[str | None, str | None]:
    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return TrustedProxies(ProxiesSection(networks=NETWORKS, header=header)).client(raw)


@pytest.mark.parametrize(
    ("addresses", "schemes", "expected"),
    [
        ("192.0.2.1", "https", ("192.0.2.1", "https")),
        ("6.6.6.6, 192.0.2.1", "https", ("192.0.2.1", "https")),
        ("6.6.6.6, 192.0.2.1, 10.1.2.3", "http, https, http", ("192.0.2.1", "https")),
        ("192.0.2.1:4711", "HTTPS", ("192.0.2.1", "https")),
        ("2001:db8:2::1", "", ("2001:db8:2::1", None)),
        ("[2001:db8:2::1]:80, 2001:db8:1::7", "", ("2001:db8:2::1", None)),
        ("::ffff:192.0.2.1", "ftp", ("192.0.2.1", None)),
        ("10.0.0.1, 10.0.0.2", "", ("10.0.0.1", None)),
        ("6.6.6.6, unknown, 10.0.0.2", "https", ("10.0.0.2", "https")),
        ("evil\x7f", "https", (None, "https")),
        ("", "", (None, None)),
    ],
)
def test_x_forwarded(addresses: str, schemes: str, expected: tuple[str | None, str | None]) -> None:
    said = client_of(x_forwarded_for=addresses, x_forwarded_proto=schemes)
    assert said == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("for=192.0.2.1;proto=https;by=10.0.0.1", ("192.0.2.1", "https")),
        ('For="[2001:db8:2::1]:4711"; Proto=http', ("2001:db8:2::1", "http")),
        ("for=6.6.6.6, for=192.0.2.1;proto=https, for=10.0.0.9", ("192.0.2.1", "https")),
        ("for=6.6.6.6, for=_hidden;proto=https", (None, "https")),
        ("garbage", (None, None)),
    ],
)
def test_forwarded(value: str, expected: tuple[str | None, str | None]) -> None:
    assert client_of("forwarded", forwarded=value) == expected


def test_only_the_header_that_is_named() -> None:
    assert client_of("forwarded", x_forwarded_for="6.6.6.6") == (None, None)
    assert client_of(forwarded="for=6.6.6.6") == (None, None)


@pytest.mark.parametrize("networks", [["10.0.0.1/8"], ["any"], [""]])
def test_networks_that_are_none(networks: list[str]) -> None:
    with pytest.raises(ValueError, match=r"write an address or a network, as 10\.0\.0\.0/8"):
        ProxiesSection(networks=networks)


def logged(capsys: pytest.CaptureFixture[str], setup: Setup, **headers: str) -> dict[str, Any]:
    capsys.readouterr()
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    client().post(f"{setup.url}/v1/completions", json=BODY, headers=names)
    client().get(f"{setup.url}/reset", headers={**names, **AS_OPERATOR})
    out: list[str] = []

    def has_all() -> bool:
        out.append(capsys.readouterr().out)
        return "audit" in "".join(out)

    assert wait_for(has_all)
    first, *_, last = (json.loads(line) for line in "".join(out).splitlines())
    return {"client": first.get("client"), "audited": last.get("client")}


def test_the_access_log_has_the_client(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    setup = make(section={"proxies": {"networks": NETWORKS}})
    expected = {"client": "192.0.2.1", "audited": "192.0.2.1"}
    assert logged(capsys, setup, x_forwarded_for="6.6.6.6, 192.0.2.1") == expected
    direct = {"client": "127.0.0.1", "audited": "127.0.0.1"}
    assert logged(capsys, setup) == direct
    # Not a proxy: its word is not believed, nor passed on.
    setup = make(section={"proxies": {"networks": ["10.0.0.0/8"]}})
    assert logged(capsys, setup, x_forwarded_for="192.0.2.1", forwarded="for=1.2.3.4") == direct
    assert not {"x-forwarded-for", "forwarded"} & set(setup.decode.headers[0])
    # By default, lines have no addresses.
    nothing = {"client": None, "audited": None}
    assert logged(capsys, make(), x_forwarded_for="192.0.2.1") == nothing


def test_failures_have_no_address(make: Make) -> None:
    setup = make(section={"proxies": {"networks": NETWORKS}})
    setup.decode.status = 500
    headers = {"x-forwarded-for": "192.0.2.1"}
    client().post(f"{setup.url}/v1/completions", json=BODY, headers=headers)
    state = client().get(f"{setup.url}/ui/state", headers=AS_OPERATOR)
    assert state.json()["failures"]
    assert "192.0.2.1" not in state.text
