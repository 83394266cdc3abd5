"""Which requests the router sends to which engine, and what the client gets after a failure."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from unit.router.conftest import AS_OPERATOR, LAST, PARAMS, Setup, event, leave, wait_for

from disagg.config import RouterSection
from disagg.credentials import ApiKey
from disagg.router.main import RouterServer, bind, create_app
from disagg.testing.http import client

Make = Callable[..., Setup]


def post(setup: Setup, body: Any, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return client().post(f"{setup.url}{path}", json=body, timeout=20, **options)


def metric(setup: Setup, sample: str) -> float:
    for line in client().get(f"{setup.url}/metrics", timeout=10).text.splitlines():
        if line.startswith(sample + " "):
            return float(line.rpartition(" ")[2])
    return 0.0


BODY = {"model": "m", "prompt": "hello", "max_tokens": 7, "temperature": 0.5}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_both_legs(setup: Setup, path: str) -> None:
    body = {
        **BODY,
        "max_completion_tokens": 7,
        "min_tokens": 3,
        "n": 2,
        "best_of": 2,
        "logprobs": 2,
        "stop": ["x"],
        "seed": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = post(setup, body, path, headers={"x-request-id": "abc"})
    (prefill,), (decode,) = setup.prefill.bodies, setup.decode.bodies
    assert answer.content == b"".join(event(n) for n in range(3)) + b"data: [DONE]\n\n"
    assert answer.headers["content-type"] == "text/event-stream"
    assert decode == {**body, "kv_transfer_params": PARAMS}
    assert prefill["kv_transfer_params"]["do_remote_decode"] is True
    assert (prefill["stream"], prefill["max_tokens"], prefill["n"]) == (False, 1, 1)
    assert prefill["max_completion_tokens"] == 1
    assert prefill["stop"] == ["x"]
    assert not {"stream_options", "min_tokens", "best_of", "logprobs"} & prefill.keys()
    ids = {h["x-request-id"] for h in setup.prefill.headers + setup.decode.headers}
    assert ids == {"abc"}


@pytest.mark.parametrize(
    ("path", "limit", "asked"),
    [
        ("/v1/responses", "max_output_tokens", {"input": "hello", "store": True, "include": ["x"]}),
        ("/v1/messages", "max_tokens", {"messages": [{"role": "user", "content": "hello"}]}),
    ],
)
def test_both_legs_of_newer_apis(setup: Setup, path: str, limit: str, asked: Any) -> None:
    body = {"model": "m", limit: 9, "stream": True, **asked}
    answer = post(setup, body, path)
    (prefill,), (decode,) = setup.prefill.bodies, setup.decode.bodies
    assert answer.content == b"".join(event(n) for n in range(3)) + LAST[path]
    assert decode == {**body, "kv_transfer_params": PARAMS}
    assert prefill.pop("kv_transfer_params")["do_remote_decode"] is True
    expected = {**body, limit: 1, "stream": False} | ({"store": False} if "store" in body else {})
    expected.pop("include", None)
    assert prefill == expected


@pytest.mark.parametrize("path", LAST)
def test_newer_apis_name_their_errors(setup: Setup, path: str) -> None:
    setup.decode.cut_after = 1
    body = {"model": "m", "messages": [], "stream": True}
    last = post(setup, body, path).content.rstrip().rpartition(b"\n\n")[2]
    name, _, data = last.partition(b"\n")
    assert name == b"event: error"
    said = json.loads(data.removeprefix(b"data: "))
    assert said["type"] == "error"
    if path == "/v1/messages":
        assert said["error"]["type"] == "api_error"
        assert said["error"].keys() == {"type", "message"}
    else:
        assert said["error"]["code"] == 502


@pytest.mark.parametrize(
    "more",
    [
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"tools": [{"type": "web_search"}]},
        {"tools": [{"type": "function", "name": "f"}, {"type": "mcp"}]},
    ],
)
def test_requests_with_state_at_an_engine_go_to_decode(setup: Setup, more: dict[str, Any]) -> None:
    post(setup, {"model": "m", "input": "hello", **more}, "/v1/responses")
    assert not setup.prefill.bodies
    assert setup.decode.bodies
    assert metric(setup, 'disagg_router_local_total{reason="stateful"}') == 1


def test_the_key_of_anthropics_clients(make: Make) -> None:
    setup = make(api_keys=[ApiKey("k", "secret")])
    headers = {"x-api-key": "secret"}
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    assert post(setup, body, "/v1/messages", headers=headers).status_code == 200
    refused = post(setup, body, "/v1/messages", headers={"x-api-key": "other"})
    assert refused.status_code == 401
    assert refused.json()["type"] == "error"
    assert refused.json()["error"]["type"] == "authentication_error"
    for engine in (setup.prefill, setup.decode):
        assert not any("x-api-key" in sent for sent in engine.headers)


def test_without_streaming(setup: Setup) -> None:
    answer = post(setup, BODY)
    assert answer.json()["role"] == "decode"
    assert setup.decode.bodies[0]["max_tokens"] == 7
    assert metric(setup, 'disagg_router_requests_total{route="/v1/completions",status="200"}') == 1
    assert metric(setup, "disagg_router_ttft_seconds_count") == 1
    assert metric(setup, 'disagg_router_in_flight{role="decode"}') == 0


def test_clients_params_are_dropped(setup: Setup) -> None:
    forged = {"do_remote_prefill": True, "remote_host": "evil"}
    doors = {name: {"kv_transfer_params": forged, "x": 1} for name in ("vllm_xargs", "extra_body")}
    post(setup, {**BODY, "kv_transfer_params": forged, **doors})
    for body in (setup.prefill.bodies[0], setup.decode.bodies[0]):
        assert "evil" not in str(body)
        assert body["vllm_xargs"] == {"x": 1}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"prompt": ["a", "b"]}, "several_prompts"),
        ({"prompt": [[1, 2], [3]]}, "several_prompts"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "beam_search"),
    ],
)
def test_no_prefill_leg_where_it_is_of_no_use(
    setup: Setup, extra: dict[str, Any], reason: str
) -> None:
    assert post(setup, {**BODY, **extra}).status_code == 200
    assert setup.prefill.bodies == []
    assert setup.decode.bodies == [{**BODY, **extra}]
    assert metric(setup, f'disagg_router_local_total{{reason="{reason}"}}') == 1


@pytest.mark.parametrize("prompt", [[1, 2, 3], ["one"], [[5, 6]], "text"])
def test_one_prompt_in_any_form(setup: Setup, prompt: Any) -> None:
    post(setup, {**BODY, "prompt": prompt})
    assert len(setup.prefill.bodies) == 1


def test_prefill_refusal_is_the_answer(setup: Setup) -> None:
    setup.prefill.status = 400
    answer = post(setup, BODY)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "told to")
    assert setup.decode.bodies == []


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("failure", ["status", "dead", "no-params", "slow"])
def test_prefill_fails(make: Make, failure: str, strict: bool) -> None:
    # No probe comes between: one that finds the engine dead would have it left out.
    limits = {"prefill_timeout_s": 0.3}
    setup = make(strict=strict, limits=limits, section={"probe_interval_s": 60})
    if failure == "status":
        setup.prefill.status = 500
    elif failure == "dead":
        setup.lose(setup.prefill)
    elif failure == "no-params":
        setup.prefill.params = None
    else:
        setup.prefill.first_byte_s = 5
    answer = post(setup, BODY)
    reason = "no_params" if failure == "no-params" else "prefill_failed"
    assert metric(setup, f'disagg_router_local_total{{reason="{reason}"}}') == 1
    if strict:
        assert answer.status_code == 502
        assert reason in answer.json()["error"]["message"]
        assert setup.decode.bodies == []
    else:
        assert answer.json()["role"] == "decode"
        assert setup.decode.bodies == [BODY]


@pytest.mark.parametrize(
    ("failure", "status"), [("status", 500), ("refuses", 400), ("dead", 503), ("slow", 504)]
)
def test_decode_fails_and_the_lease_is_released(make: Make, failure: str, status: int) -> None:
    limits = {"first_byte_timeout_s": 0.3, "queue_timeout_s": 0.3}
    setup = make(limits=limits, section={"probe_interval_s": 60})  # no probe comes between
    if failure in ("status", "refuses"):
        setup.decode.status = status
    elif failure == "dead":
        setup.lose(setup.decode)
    else:
        setup.decode.first_byte_s = 5
    answer = post(setup, BODY)
    assert answer.status_code == status
    assert "127.0.0.1" not in answer.text
    assert answer.json()["error"]["message"]
    assert wait_for(lambda: setup.prefill.released == [PARAMS])
    released = 'disagg_router_releases_total{outcome="released"}'
    assert wait_for(lambda: metric(setup, released) == 1)


def test_stream_that_breaks_off_ends_with_an_error(setup: Setup) -> None:
    setup.decode.cut_after = 2
    answer = post(setup, {**BODY, "stream": True})
    assert answer.status_code == 200
    assert answer.content.startswith(event(0) + event(1))
    assert b'data: {"error": {' in answer.content
    assert b"[DONE]" not in answer.content


def test_stream_that_falls_silent_ends_with_an_error(make: Make) -> None:
    setup = make(limits={"between_bytes_timeout_s": 0.3})
    setup.decode.chunk_s = 5
    began = time.monotonic()
    answer = post(setup, {**BODY, "stream": True})
    assert b"silent for 0.3 s" in answer.content
    assert time.monotonic() - began < 3
    assert wait_for(setup.decode.left.is_set)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_client_leaves_before_the_first_byte(setup: Setup, leg: str, stream: bool) -> None:
    engine = getattr(setup, leg)
    engine.first_byte_s = 20
    leave(setup.url, {**BODY, "stream": stream}, lambda: engine.bodies)
    assert wait_for(engine.left.is_set, 2)
    if leg == "decode":
        assert wait_for(lambda: setup.prefill.released == [PARAMS])
    left = 'disagg_router_requests_total{route="/v1/completions",status="499"}'
    assert wait_for(lambda: metric(setup, left) == 1)


def test_client_leaves_in_mid_stream(setup: Setup) -> None:
    setup.decode.chunk_s, setup.decode.chunks = 0.05, 1000
    url = f"{setup.url}/v1/completions"
    with client().stream("POST", url, json={**BODY, "stream": True}, timeout=10) as answer:
        next(answer.iter_raw())
    assert wait_for(setup.decode.left.is_set, 2)
    assert wait_for(lambda: metric(setup, 'disagg_router_in_flight{role="decode"}') == 0)


def test_many_clients_leave_no_state(setup: Setup) -> None:
    setup.decode.chunk_s = 0.01
    threads = [
        threading.Thread(target=post, args=(setup, {**BODY, "stream": True})) for _ in range(50)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert metric(setup, 'disagg_router_requests_total{route="/v1/completions",status="200"}') == 50
    for role in ("prefill", "decode"):
        assert metric(setup, f'disagg_router_in_flight{{role="{role}"}}') == 0


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[1]",
        b"7",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        rb'{"prompt": "\ud800"}',
        b'{"prompt": ' + b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=range(8),
)
def test_bad_body(setup: Setup, body: bytes) -> None:
    answer = client().post(f"{setup.url}/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("text", [r"\ud800", r"\udc00 b", r"\ud83d\u0041", r"\ud83d tail " * 9])
def test_a_lone_surrogate_is_named(setup: Setup, text: str) -> None:
    for body in (f'{{"prompt": "{text}"}}', f'{{"messages": [{{"content": ["{text}"]}}]}}'):
        answer = client().post(f"{setup.url}/v1/completions", content=body.encode())
        assert answer.status_code == 400
        assert "has a lone surrogate" in answer.json()["error"]["message"]
    cut = client().post(f"{setup.url}/v1/completions", content=rb'{"prompt": "\ud83d\ude00')
    assert "truncated" in cut.json()["error"]["message"]


def test_deeply_nested_bodies(setup: Setup) -> None:
    for depth in range(800, 1100, 10):
        body = b'{"prompt": "x", "a": ' + b"[" * depth + b"]" * depth + b"}"
        answer = client().post(f"{setup.url}/v1/completions", content=body)
        assert answer.status_code in (200, 400)
        served = int(answer.status_code == 200)
        assert (len(setup.prefill.bodies), len(setup.decode.bodies)) == (served, served)
        setup.prefill.bodies.clear()
        setup.decode.bodies.clear()


def test_large_body(make: Make) -> None:
    setup = make(limits={"max_body_bytes": 1000})
    answer = post(setup, {**BODY, "prompt": "x" * 2000})
    assert answer.status_code == 413
    assert "router.limits.max_body_bytes" in answer.json()["error"]["message"]


def test_api_keys(make: Make) -> None:
    setup = make(api_keys=[ApiKey(None, "first"), ApiKey("bob", "second")], engine_key="inner")
    assert post(setup, BODY).status_code == 401
    assert post(setup, BODY, headers={"authorization": "Bearer third"}).status_code == 401
    assert post(setup, BODY, headers={"authorization": "Basic first"}).status_code == 401
    assert post(setup, BODY, headers={"authorization": "Bearer second"}).status_code == 200
    for engine in (setup.prefill, setup.decode):
        assert engine.headers[0]["authorization"] == "Bearer inner"
    assert client().get(f"{setup.url}/v1/models").status_code == 401
    for path in ("/health", "/ready", "/metrics"):
        assert client().get(f"{setup.url}{path}").status_code == 200


def test_other_paths_go_to_decode_unchanged(setup: Setup) -> None:
    answer = client().post(f"{setup.url}/tokenize?a=1&b=%20", content=b"raw")
    assert answer.json() == {"path": "/tokenize?a=1&b=%20", "method": "POST", "text": "raw"}
    assert client().get(f"{setup.url}/v1/models").json()["path"] == "/v1/models"
    assert client().get(f"{setup.url}/v1/missing", headers=AS_OPERATOR).status_code == 404


def passed(setup: Setup, body: bytes, kind: str | None = "application/json") -> httpx.Response:
    headers = {"content-type": kind} if kind else {}
    return client().post(f"{setup.url}/v1/embeddings", content=body, headers=headers)


KEY = "kv_transfer_params"


@pytest.mark.parametrize("spelling", [KEY, r"kv\u005ftransfer_params", r"\u006B" + KEY[1:]])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-32-be"])
def test_params_are_dropped_from_other_bodies(setup: Setup, spelling: str, encoding: str) -> None:
    forged = f'"{spelling}": {{"remote_host": "evil"}}'
    body = f'{{"input": "ä", {forged}, "vllm_xargs": {{"x": 1, {forged}}}, "n": 1.0,'
    body += f'"extra_body": {{{forged}}}, "sampling_params": {{"extra_args": {{{forged}}}}}}}'
    answer = passed(setup, body.encode(encoding))
    assert answer.status_code == 200
    assert json.loads(answer.json()["text"]) == {
        "input": "ä",
        "vllm_xargs": {"x": 1},
        "n": 1.0,
        "extra_body": {},
        "sampling_params": {"extra_args": {}},
    }


@pytest.mark.parametrize(
    "body",
    [
        b'{ "input":  "kv" , "a": 1e2 }',
        rb'{"input": "say \u0041", "input": "twice"}',
        rb'{ "input": "kv_transfer_params", "u":"\ud800" }',
        b"[]",
        b"{not json",
    ],
)
def test_a_body_without_params_is_passed_byte_for_byte(setup: Setup, body: bytes) -> None:
    assert passed(setup, body).json()["text"].encode() == body


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b'{"kv_transfer_params": ', "application/json", 400),
        (b'{"kv_transfer_params":' * 100_000, None, 400),
        (b'name="vllm_xargs"\r\n\r\n{"kv_transfer_params": "x"}', "multipart/form-data", 400),
        (rb'name="vllm_xargs"|{"kv\u005ftransfer_params": 1}', "multipart/form-data", 400),
        (b"\x00\x01 \\u0041 a sound", "multipart/form-data; boundary=x", 200),
        (b"\x00\x01 \\u0041 a sound", None, 200),
    ],
    ids=range(6),
)
def test_unreadable_bodies(setup: Setup, body: bytes, kind: str | None, status: int) -> None:
    answer = passed(setup, body, kind)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["type"] == "BadRequestError"
    else:
        assert answer.json()["text"].encode() == body


def raw(setup: Setup, request: bytes) -> bytes:
    """The answer to these bytes on a new connection."""
    host, port = setup.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_client_leaves_during_its_upload(
    capfd: pytest.CaptureFixture[str], make: Make, path: str
) -> None:
    setup = make()
    host, port = setup.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{{".encode()
        )
        time.sleep(0.1)
    route = path if path == "/v1/completions" else "other"
    left = f'disagg_router_requests_total{{route="{route}",status="499"}}'
    assert wait_for(lambda: metric(setup, left) == 1)
    assert capfd.readouterr().err == ""


def test_a_defect_of_the_router_is_an_openai_error(
    capfd: pytest.CaptureFixture[str], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = make()

    def broken(body: Any) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr("disagg.router.api.bodies.without_params", broken)
    answer = post(setup, BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "InternalServerError")
    assert "of the test" not in answer.text
    logged: list[str] = []

    def is_logged() -> bool:
        logged.append(capfd.readouterr().err)
        return "ZeroDivisionError: of the test" in "".join(logged)

    assert wait_for(is_logged)
    assert metric(setup, 'disagg_router_requests_total{route="/v1/completions",status="500"}') == 1


@pytest.mark.parametrize(
    ("request_line", "status", "kind"),
    [("TRACE /x", 405, "MethodNotAllowedError"), ("OPTIONS *", 404, "NotFoundError")],
)
def test_errors_of_the_framework(setup: Setup, request_line: str, status: int, kind: str) -> None:
    text = raw(setup, f"{request_line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert text.startswith(f"HTTP/1.1 {status} ".encode())
    assert json.loads(text.partition(b"\r\n\r\n")[2])["error"]["type"] == kind


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/models"])
def test_head(setup: Setup, path: str) -> None:
    answer = httpx.head(f"{setup.url}{path}")
    assert (answer.status_code, answer.content) == (200, b"")
    if path == "/v1/models":
        seen = {"path": path, "method": "HEAD", "text": ""}
        expected = len(json.dumps({"data": [{"id": "m"}], **seen}))
        assert answer.headers["content-length"] == str(expected)


@pytest.mark.parametrize("ending", ["answered", "client-left", "engine-refused", "engine-cut"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_in_flight_covers_decode_from_sending_to_the_end(
    setup: Setup, path: str, ending: str
) -> None:
    gauge = 'disagg_router_in_flight{role="decode"}'
    setup.decode.gate = threading.Event()
    setup.decode.status = 400 if ending == "engine-refused" else 200
    setup.decode.cut_after = 0 if ending == "engine-cut" else None
    host, port = setup.url.removeprefix("http://").split(":")
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    with socket.create_connection((host, int(port)), timeout=20) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert wait_for(lambda: metric(setup, gauge) == 1)
        if ending != "client-left":
            setup.decode.gate.set()
            while client.recv(65536):
                continue
    assert wait_for(lambda: metric(setup, gauge) == 0)
    setup.decode.gate.set()


def test_an_incomplete_answer_does_not_look_complete(
    capfd: pytest.CaptureFixture[str], make: Make
) -> None:
    setup = make()
    with pytest.raises(httpx.RemoteProtocolError):
        client().get(f"{setup.url}/cut", headers=AS_OPERATOR)
    assert "Traceback" not in capfd.readouterr().err


def test_headers_of_an_answer_are_kept(setup: Setup) -> None:
    headers = {"cookie": "mine=1", "expect": "x", **AS_OPERATOR}
    answer = client().get(f"{setup.url}/gzip", headers=headers)
    assert answer.text == "packed"
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert client().get(f"{setup.url}/gzip", headers=AS_OPERATOR).headers["seen-cookie"] == ""
    empty = client().get(f"{setup.url}/empty", headers=AS_OPERATOR)
    assert (empty.status_code, empty.content) == (204, b"")
    assert "transfer-encoding" not in empty.headers


def test_pipelined_requests(setup: Setup) -> None:
    one = b"GET /v1/models?one HTTP/1.1\r\nhost: x\r\n\r\n"
    two = b"GET /v1/models?two HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    text = raw(setup, one + two)
    assert 0 < text.index(b"/v1/models?one") < text.index(b"/v1/models?two")


@pytest.mark.parametrize("value", [b"\x80\xff", b"\t x", b"x" * 30_000])
def test_odd_header_values(setup: Setup, value: bytes) -> None:
    head = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-odd: " + value
    text = raw(setup, head + b"\r\n\r\n")
    assert text.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 400 "))


@pytest.mark.parametrize(
    "path", ["/disagg/release", "/disagg", "//disagg/release", "/x/../disagg/release"]
)
def test_engines_internal_paths_are_not_for_clients(setup: Setup, path: str) -> None:
    body = b'{"kv_transfer_params": {}}'
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    raw(setup, f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    assert setup.prefill.released == setup.decode.released == []


def test_ready_is_not_health(setup: Setup) -> None:
    assert client().get(f"{setup.url}/ready").json()["ready"] is True
    setup.loop.run(setup.prefill.stop())
    assert wait_for(lambda: client().get(f"{setup.url}/ready").status_code == 503)
    assert client().get(f"{setup.url}/ready").json()["engines"]["prefill-0"] != "up"
    assert client().get(f"{setup.url}/health").status_code == 200


def test_metrics_of_all_engines(setup: Setup) -> None:
    text = client().get(f"{setup.url}/metrics").text
    for role in ("prefill", "decode"):
        assert f'disagg_leases_held{{engine="{role}-0",role="{role}"}} 2.0' in text
        assert (
            f'disagg_leases_total{{engine="{role}-0",outcome="fetched",role="{role}"}} 5.0' in text
        )
        of_vllm = f'engine="{role}-0",model_name="m",role="{role}"'
        assert f"vllm:num_requests_running{{{of_vllm}}} 3.0" in text
    assert text.count("# TYPE disagg_leases_held gauge") == 1
    assert "vllm:other" not in text
    setup.loop.run(setup.decode.stop())
    down = 'disagg_router_engine_up{engine="decode-0",role="decode"} 0.0'
    assert wait_for(lambda: down in client().get(f"{setup.url}/metrics").text)
    text = client().get(f"{setup.url}/metrics").text
    assert 'disagg_router_engine_up{engine="prefill-0",role="prefill"} 1.0' in text
    assert text.count("# TYPE disagg_router_engine_up gauge") == 1


def test_two_routers_in_one_process(make: Make) -> None:
    one, two = make(), make()
    post(one, BODY)
    counted = 'disagg_router_requests_total{route="/v1/completions",status="200"}'
    assert (metric(one, counted), metric(two, counted)) == (1, 0)


def test_a_server_that_exits_by_itself_is_noticed(setup: Setup) -> None:
    async def serve(*, stop: bool) -> None:
        server = RouterServer(create_app(RouterSection(port=0), []), bind("127.0.0.1", 0))
        await server.start()
        ended = asyncio.create_task(server.ended())
        await asyncio.sleep(0.05)
        assert not ended.done()
        if stop:
            await server.stop(1)
        else:
            server._server.should_exit = True
        await ended

    setup.loop.run(serve(stop=True))
    with pytest.raises(RuntimeError, match="exited by itself"):
        setup.loop.run(serve(stop=False))
