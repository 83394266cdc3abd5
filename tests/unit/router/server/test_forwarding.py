"""Which model's engines get requests that are passed on as they are."""

from __future__ import annotations

from typing import Any

import httpx
from unit.router.conftest import AS_OPERATOR, wait_for
from unit.router.server.conftest import LIMIT_S, Models

from disagg.testing.http import client


def test_other_paths_go_where_the_body_or_the_query_says(models: Models) -> None:
    code = models.decode("org/code")
    assert models.post("/v1/embeddings", {"model": "org/code", "input": "x"}).status_code == 200
    assert models.post("/tokenize?model=org/code", {"prompt": "x"}).status_code == 200
    assert models.get("/load?model=org%2Fcode").status_code == 200
    form: dict[str, Any] = {
        "model": (None, "org/code"),
        "file": ("a.wav", b'name="model"\r\n\r\nchat'),
    }
    url = f"{models.url}/v1/audio/transcriptions"
    assert client().post(url, files=form, timeout=LIMIT_S).status_code == 200
    asked = ["/v1/embeddings", "/tokenize?model=org/code", "/load?model=org%2Fcode"]
    assert code.calls == [*asked, "/v1/audio/transcriptions"]
    assert models.get("/version").json()["path"] == "/version"
    unknown = models.post("/v1/messages/count_tokens", {"model": "other"})
    assert (unknown.status_code, unknown.json()["type"]) == (404, "error")
    unknown = models.post("/v1/embeddings", {"model": "other"})
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
    unnamed = models.post("/tokenize", {"prompt": "x"})
    assert unnamed.status_code == 400
    assert "?model=NAME" in unnamed.json()["error"]["message"]


def test_a_call_that_changes_engines_changes_those_of_one_model(models: Models) -> None:
    assert models.post("/sleep?model=chat", None, headers=AS_OPERATOR).status_code == 200
    assert models.post("/sleep", None, headers=AS_OPERATOR).status_code == 400
    assert models.post("/sleep?model=chat", None).status_code == 403
    assert [engine.calls for engine in models.engines["chat"]] == [["/sleep?model=chat"]] * 2
    assert [engine.calls for engine in models.engines["org/code"]] == [[], []]


def test_the_list_is_that_of_all_engines(models: Models) -> None:
    models.decode("chat").served = ["poet", "org/code"]  # it does not get another model's requests
    assert wait_for(lambda: models.listed() == ["chat", "poet", "org/code"])
    assert models.get("/v1/models").json()["object"] == "list"
    assert models.complete("org/code").status_code == 200
    assert len(models.decode("org/code").bodies) == 1
    assert models.get("/v1/models?model=org/code").json()["data"] == [
        {"id": "org/code", "object": "model"}
    ]


def test_the_list_has_a_head(models: Models) -> None:
    answer = client().head(f"{models.url}/v1/models")
    assert (answer.status_code, answer.content) == (200, b"")
    assert models.get("/health").status_code == 200  # the connection goes on


# ---- adapters ---------------------------------------------------------------------------------


def test_adapters_belong_to_their_base(models: Models) -> None:
    def admin(path: str, **body: Any) -> httpx.Response:
        return models.post(path, body, headers=AS_OPERATOR)

    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    assert models.complete("poet").status_code == 404
    assert admin(load, lora_name="poet", lora_path="/a").status_code == 400
    assert admin(load, model="chat", lora_name="poet", lora_path="/a").status_code == 200
    assert models.complete("poet").status_code == 200
    assert models.decode("chat").bodies[-1]["model"] == "poet"
    assert "poet" in models.listed()
    taken = admin(load, model="org/code", lora_name="poet", lora_path="/a")
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert models.decode("org/code").served == []
    assert admin(unload, lora_name="poet").status_code == 200
    assert models.complete("poet").status_code == 404
    assert admin(load, model="org/code", lora_name="poet", lora_path="/a").status_code == 200
    assert models.complete("poet").status_code == 200
    assert models.decode("org/code").bodies[-1]["model"] == "poet"
