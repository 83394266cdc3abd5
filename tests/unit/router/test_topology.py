"""Engines' URLs: what is refused, what a path, a user and https mean, over real HTTP."""

from __future__ import annotations

import base64
import json
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from unit.router.conftest import AS_OPERATOR, Loop, certificate, wait_for
from unit.router.scripted import Script, ScriptedEngine, routed

from disagg.chaos.expected_answers import events
from disagg.config import RouterSection, load_router
from disagg.errors import ConfigError
from disagg.router import main
from disagg.router.topology import EngineEndpoint, parse_endpoint, with_events

COMPLETION = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 2}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "is empty; write it as http://HOST:8000"),
        ("  ", "is empty"),
        ("host:8000", "has no scheme; write it as http://HOST:8000"),
        ("//host:8000", "has no scheme"),
        ("ftp://host", "ftp is no scheme of engines; write http:// or https://"),
        ("http://", "names no host"),
        ("http://:8000", "names no host"),
        ("http://host:port", "its port is no number from 1 to 65535"),
        ("http://host:0", "its port is no number"),
        ("http://host:70000", "its port is no number"),
        ("http://host:-1", "its port is no number"),
        ("http://host:", "its port is no number"),
        ("http://ho st:1", "has a space or another character that no URL has"),
        ("http://host:1 ", "has a space"),
        ("http://höst:1", "has a space or another character"),
        ("http://host:1\r\nx: y", "has a space or another character"),
        ("http://host:1/?a=b", "has a query or a fragment; end the URL before it"),
        ("http://host:1?", "has a query or a fragment"),
        ("http://host:1/#x", "has a query or a fragment"),
        ("http://[::1:80", "its host is no IPv6 address in brackets"),
        ("http://[::z]:80", "its host is no"),
        ("http://-x-:80", "its host is no name and no address"),
        ("http://host:1/a/../b", "its path has . or .."),
        ("http://host:1/%2e%2e/b", "its path has . or .."),
        ("http://a%3Ab:c@host:1", "its user has a colon"),
    ],
)
def test_what_is_refused(url: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=r"^--decode: ") as caught:
        parse_endpoint("decode-0", "decode", url, "--decode")
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://ann:s3cret@", "http://ann:s3cret@h:1?x", "ann:s3cret@h", "http://h/?k=s3cret"]
)
def test_an_error_shows_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_endpoint("decode-0", "decode", url, "--decode")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000"),
        ("HTTP://host:8000/", "http://host:8000"),
        ("https://host", "https://host"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
        ("http://host:1/v1/", "http://host:1"),
        ("http://host:1/a/b/v1", "http://host:1/a/b"),
        ("http://host:1/a%20b/", "http://host:1/a%20b"),
        ("http://host:1/xv1", "http://host:1/xv1"),
    ],
)
def test_what_is_understood(url: str, base: str) -> None:
    assert parse_endpoint("decode-0", "decode", url, "x") == EngineEndpoint(
        "decode-0", "decode", base
    )


def test_a_user_becomes_authorization() -> None:
    engine = parse_endpoint("d", "decode", "http://a%40b:p%C3%A4ss%2F@host:1", "x")
    expected = "Basic " + base64.b64encode("a@b:päss/".encode()).decode()
    assert (engine.url, engine.headers) == ("http://host:1", {"authorization": expected})
    assert expected not in repr(engine)


def test_urls_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.yaml"
    file.write_text("port: 0\nengines:\n  decode: [http://a:s3cret@h:1/, 'no scheme']\n")
    section = load_router(file, {})
    assert "s3cret" not in repr(section)
    with pytest.raises(ConfigError, match=r"^engines\.decode: 'no scheme' — has a space"):
        main.run(section, [], [])
    with pytest.raises(ConfigError, match=r"^--decode: 'ftp://x' — ftp is no scheme"):
        main.run(section, [], ["ftp://x"])
    with pytest.raises(ConfigError, match=r"^engines\.decode: empty"):
        main.run(RouterSection(port=0), [], [])


def test_a_prefix_and_a_user_are_on_every_request(loop: Loop) -> None:
    """Legs, a forwarded path, a call of an operator, probes, metrics and releases."""
    script = Script(
        [lambda path, body: list(events(path, body))] * 2, prefix="/team/a", metrics=b"\n"
    )
    engines = [ScriptedEngine("prefill", script), ScriptedEngine("decode", script)]

    def endpoint(engine: ScriptedEngine, name: str) -> EngineEndpoint:
        url = f"http://ann:s3cret@127.0.0.1:{engine.port}/team/a/v1"
        return parse_endpoint(name, engine.role, url, "x")

    with routed(loop, engines, endpoint) as url:
        shown = [httpx.get(f"{url}{path}").text for path in ("/ready", "/ui/state", "/metrics")]
        asked = httpx.post(f"{url}/v1/completions", json={**COMPLETION, "stream": True})
        assert b"[DONE]" in asked.content
        script.streams[:] = [lambda path, body: [400]] * 2
        httpx.post(f"{url}/v1/completions", json={**COMPLETION, "stream": True})
        httpx.get(f"{url}/v1/models")
        httpx.post(f"{url}/reset_prefix_cache", headers=AS_OPERATOR)
        assert wait_for(lambda: "/team/a/disagg/release" in {path for path, _ in script.seen})
    paths = {path for path, _ in script.seen}
    assert all(path.startswith("/team/a/") for path in paths)
    wanted = {"/health", "/metrics", "/v1/models", "/reset_prefix_cache", "/disagg/release"}
    wanted |= {"/version", "/disagg/fingerprint", "/v1/completions", "/disagg/adapters"}
    assert wanted <= {path.removeprefix("/team/a") for path in paths}
    basic = "Basic " + base64.b64encode(b"ann:s3cret").decode()
    assert {authorization for _, authorization in script.seen} == {basic}
    assert not any("s3cret" in text or basic in text for text in shown)


def test_engines_with_a_certificate_that_want_one(loop: Loop, tmp_path: Path) -> None:
    own, router = certificate(tmp_path, "engine"), certificate(tmp_path, "router")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=router[0])
    context.load_cert_chain(*own)
    context.verify_mode = ssl.CERT_REQUIRED
    script = Script([lambda path, body: list(events(path, body))], metrics=b"disagg_x 1\n")
    Path(router[1]).chmod(0o600)

    def endpoint(engine: ScriptedEngine, name: str) -> EngineEndpoint:
        return EngineEndpoint(name, engine.role, f"https://127.0.0.1:{engine.port}")

    def engines() -> list[ScriptedEngine]:
        prefill = ScriptedEngine("prefill", script, context)
        return [prefill, ScriptedEngine("decode", script, context)]

    trusts: dict[str, Any] = {"engine_tls_ca_file": own[0]}
    shows: dict[str, Any] = {"engine_tls_cert_file": router[0], "engine_tls_key_file": router[1]}
    with routed(loop, engines(), endpoint, **trusts, **shows) as url:
        assert wait_for(lambda: httpx.get(f"{url}/ready").status_code == 200)
        stream = httpx.post(f"{url}/v1/completions", json={**COMPLETION, "stream": True})
        assert b"[DONE]" in stream.content
        assert 'disagg_x{engine="decode-1"' in httpx.get(f"{url}/metrics").text
        httpx.get(f"{url}/v1/models").raise_for_status()
    assert [body for body in script.asked if body.get("kv_transfer_params")]
    hasty: dict[str, Any] = {"limits": {"queue_timeout_s": 0.3}}
    for settings in (trusts, {}):
        script.seen.clear()
        with routed(loop, engines(), endpoint, **settings, **hasty) as url:
            refused = httpx.post(f"{url}/v1/completions", json=COMPLETION)
            assert refused.status_code == 503
            assert json.loads(refused.content)["error"]["type"] == "ServiceUnavailableError"
        assert not script.seen


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"engine_tls_cert_file": "x"}, "router.engine_tls_key_file: empty"),
        ({"engine_tls_ca_file": "/none"}, "router.engine_tls_ca_file: '/none' — No such file"),
        ({"engine_tls_ca_file": "{noise}"}, "holds no certificate; name a PEM file"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, settings: dict[str, str], problem: str) -> None:
    from disagg import credentials

    noise = tmp_path / "noise"
    noise.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    given = {name: value.format(noise=noise) for name, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        credentials.engine_tls(RouterSection.model_validate(given))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("url", "endpoint", "replay"),
    [
        ("http://10.0.0.1:8000", "tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"),
        ("https://engine.svc/prefix", "tcp://engine.svc:5557", "tcp://engine.svc:5558"),
        ("http://[2001:db8::1]:8000", "tcp://[2001:db8::1]:5557", "tcp://[2001:db8::1]:5558"),
        ("http://10.0.0.2:8000", "tcp://10.0.0.9:6000", None),
    ],
)
def test_where_engines_publish_kv_events(url: str, endpoint: str, replay: str | None) -> None:
    sections = RouterSection.model_validate(
        {
            "engines": {
                "kv_events": {
                    "*": {"endpoint": "tcp://{host}:5557", "replay_endpoint": "tcp://{host}:5558"},
                    "http://10.0.0.2:8000": {"endpoint": "tcp://10.0.0.9:6000"},
                }
            }
        }
    ).engines.kv_events
    engine = EngineEndpoint("decode-0", "decode", url)
    found = with_events(engine, sections)
    assert (found.url, found.kv_events, found.kv_events_replay) == (url, endpoint, replay)
    assert with_events(found, {}) == with_events(found, sections) == found
    assert with_events(engine, {}) == engine


@pytest.mark.parametrize("endpoint", ["http://a:1", "tcp://", "inproc://x", "tcp://a b:1"])
def test_what_is_no_address_of_events_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError):
        RouterSection.model_validate({"engines": {"kv_events": {"*": {"endpoint": endpoint}}}})
