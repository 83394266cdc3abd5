"""Several models behind one router, over HTTP, with fake engines."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from unit.router.conftest import AS_OPERATOR, OPERATOR, FakeEngine, Loop, wait_for

from disagg.config import Role, RouterSection
from disagg.errors import ConfigError
from disagg.router.main import RouterServer, bind, create_app
from disagg.router.server.models import endpoints
from disagg.router.topology import Away
from disagg.testing.http import client

PAIRED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
LIMIT_S = 20.0


@dataclass
class Engine(FakeEngine):
    """A fake engine that loads adapters. `served`: models besides its own."""

    served: list[str] = field(default_factory=list)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/v1/load_lora_adapter":
            self.served.append((await request.json())["lora_name"])
        return await super()._respond(request)

    @property
    def calls(self) -> list[str]:
        """What it was asked besides probes."""
        probes = ("/health", "/version", "/disagg/")
        return [path for path in self.asked if not path.startswith(probes)]

    async def _other(self, request: web.Request) -> web.Response:
        if request.path == "/v1/unload_lora_adapter":
            self.served.remove((await request.json())["lora_name"])
        return await super()._other(request)

    async def _models(self, request: web.Request) -> web.Response:
        data = [{"id": name, "object": "model"} for name in (self.model, *self.served)]
        return web.json_response({"object": "list", "data": data})


@dataclass
class Models:
    """A router with several models, and the engines of each."""

    url: str
    engines: dict[str, list[Engine]]
    loop: Loop
    server: RouterServer

    def decode(self, model: str) -> Engine:
        return next(engine for engine in self.engines[model] if engine.role == "decode")

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return client().post(f"{self.url}{path}", json=body, timeout=LIMIT_S, **options)

    def complete(self, model: str, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": model, "prompt": "x", **body})

    def get(self, path: str, **options: Any) -> httpx.Response:
        return client().get(f"{self.url}{path}", timeout=LIMIT_S, **options)

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        families = text_string_to_metric_families(self.get("/metrics").text)
        return [(s.name, s.labels, s.value) for family in families for s in family.samples]


Make = Callable[..., Models]


@pytest.fixture
def make(loop: Loop) -> Iterator[Make]:
    """Starts a router for the models `chat` and `org/code`, each with its engines. `own`: settings
    by model; `section`: of the router."""
    undo: list[Callable[[], Coroutine[Any, Any, None]]] = []

    def start(
        *,
        roles: Sequence[Role] = ("prefill", "decode"),
        own: dict[str, dict[str, Any]] | None = None,
        **section: Any,
    ) -> Models:
        engines: dict[str, list[Engine]] = {}
        for name in ("chat", "org/code"):
            engines[name] = [Engine(role, model=name) for role in roles]
            for engine in engines[name]:
                loop.run(engine.start())
                undo.append(engine.stop)
        listed = [
            {
                "name": name,
                "engines": {
                    role: [engine.url for engine in group if engine.role == role]
                    for role in ("prefill", "decode")
                },
                **(own or {}).get(name, {}),
            }
            for name, group in engines.items()
        ]
        section.setdefault("pairing", {"local_prefill_tokens": 0})
        settings = RouterSection.model_validate({"port": 0, "models": listed, **section})
        sock = bind("127.0.0.1", 0)
        app = create_app(settings, endpoints(settings.models), api_keys=[OPERATOR])
        server = RouterServer(app, sock)
        loop.run(server.start())
        undo.append(lambda: server.stop(1))
        return Models(f"http://127.0.0.1:{sock.getsockname()[1]}", engines, loop, server)

    yield start
    for stop in reversed(undo):
        loop.run(stop())


@pytest.fixture
def models(make: Make) -> Models:
    return make()


# ---- which engines ----------------------------------------------------------------------------


def test_both_models_at_once_under_load(models: Models) -> None:
    def one(number: int) -> None:
        model, path = ("chat", "org/code")[number % 2], PAIRED[number % 4]
        body = {"model": model, "prompt": f"{model} {number}", "stream": number % 3 == 0}
        answer = models.post(path, body)
        assert answer.status_code == 200
        if body["stream"]:
            assert answer.text.count("data: ") >= 3
        else:
            assert answer.json()["role"] == "decode"

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(240)))
    for name, engines in models.engines.items():
        for engine in engines:
            assert {body["model"] for body in engine.bodies} == {name}
            assert len(engine.bodies) == 120
        # Blocks that prefill holds for one model are fetched by an engine of that model.
        assert all(body["kv_transfer_params"] for body in models.decode(name).bodies)


@pytest.mark.parametrize("path", PAIRED)
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_404_at_once_with_the_list(
    models: Models, path: str, stream: bool
) -> None:
    answer = models.post(path, {"model": "other", "prompt": "x", "stream": stream})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error["message"] == "The model `other` does not exist; there are: chat, org/code"
    if path == "/v1/messages":
        assert (answer.json()["type"], error["type"]) == ("error", "not_found_error")
    else:
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", 404)
    assert not any(engine.bodies for group in models.engines.values() for engine in group)


@pytest.mark.parametrize("model", [None, 5, ["chat"], {}])
def test_a_request_must_name_its_model(models: Models, model: Any) -> None:
    for path in PAIRED:
        answer = models.post(path, {"prompt": "x"} | ({} if model is None else {"model": model}))
        assert answer.status_code == 400
        assert "there are: chat, org/code" in answer.json()["error"]["message"]


def test_a_large_body_goes_to_its_model(models: Models) -> None:
    assert models.complete("org/code", prompt="x " * 100_000).status_code == 200
    assert models.complete("other", prompt="x " * 100_000).status_code == 404
    assert len(models.decode("org/code").bodies) == 1


def test_openai_s_client(models: Models) -> None:
    asks = openai.OpenAI(base_url=f"{models.url}/v1", api_key="none", max_retries=0)
    assert sorted(model.id for model in asks.models.list()) == ["chat", "org/code"]
    for name in models.engines:
        stream = asks.completions.create(model=name, prompt="x", stream=True)
        assert len(list(stream)) == 3
        assert models.decode(name).bodies[-1]["model"] == name
    with pytest.raises(openai.NotFoundError) as refused:
        asks.chat.completions.create(model="other", messages=[])
    assert refused.value.param == "model"


# ---- paths that are passed on -------------------------------------------------------------------


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


def listed(models: Models) -> list[str]:
    return [model["id"] for model in models.get("/v1/models").json()["data"]]


def test_the_list_is_that_of_all_engines(models: Models) -> None:
    models.decode("chat").served = ["poet", "org/code"]  # it does not get another model's requests
    assert wait_for(lambda: listed(models) == ["chat", "poet", "org/code"])
    assert models.get("/v1/models").json()["object"] == "list"
    assert models.complete("org/code").status_code == 200
    assert len(models.decode("org/code").bodies) == 1
    assert models.get("/v1/models?model=org/code").json()["data"] == [
        {"id": "org/code", "object": "model"}
    ]


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
    assert "poet" in listed(models)
    taken = admin(load, model="org/code", lora_name="poet", lora_path="/a")
    assert (taken.status_code, taken.json()["error"]["param"]) == (400, "lora_name")
    assert models.decode("org/code").served == []
    assert admin(unload, lora_name="poet").status_code == 200
    assert models.complete("poet").status_code == 404
    assert admin(load, model="org/code", lora_name="poet", lora_path="/a").status_code == 200
    assert models.complete("poet").status_code == 200
    assert models.decode("org/code").bodies[-1]["model"] == "poet"


def test_an_adapter_that_somebody_else_loaded_is_found(models: Models) -> None:
    assert models.complete("poet").status_code == 404
    models.decode("org/code").served.append("poet")  # through another router
    assert wait_for(lambda: models.complete("poet").status_code == 200)
    assert models.decode("org/code").bodies[-1]["model"] == "poet"


@pytest.mark.parametrize("name", ["x" * 300, "", 5, None, ["chat"]])
def test_an_odd_list_costs_nothing(models: Models, name: Any) -> None:
    models.decode("chat").model = name
    assert wait_for(lambda: listed(models) == ["org/code"])
    assert models.complete("chat").status_code == 200


# ---- failures ---------------------------------------------------------------------------------


def test_a_model_whose_engines_are_down_costs_itself_alone(make: Make) -> None:
    models = make(probe_interval_s=0.1, limits={"queue_timeout_s": 0.2, "connect_timeout_s": 1})
    models.decode("chat").served.append("poet")
    assert wait_for(lambda: models.complete("poet").status_code == 200)
    for engine in models.engines["chat"]:
        models.loop.run(engine.stop())
    assert wait_for(lambda: not models.get("/ready").json()["models"]["chat"])
    ready = models.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"chat": False, "org/code": True})
    for name in ("chat", "poet"):  # 503, not 404: the name is known
        for path in PAIRED:
            refused = models.post(path, {"model": name, "prompt": "x"})
            assert refused.status_code == 503
            assert refused.json()["error"]["message"]
    assert models.complete("org/code").status_code == 200
    assert wait_for(lambda: listed(models) == ["org/code"])
    up = {
        labels["engine"]: value
        for name, labels, value in models.samples()
        if name == "disagg_router_engine_up"
    }
    assert up == {
        "chat/prefill-0": 0.0,
        "chat/decode-0": 0.0,
        "org/code/prefill-0": 1.0,
        "org/code/decode-0": 1.0,
    }
    for engine in models.engines["chat"]:
        models.loop.run(engine.start())
    assert wait_for(lambda: models.complete("chat").status_code == 200)
    for engine in models.engines["org/code"]:
        models.loop.run(engine.stop())
    for engine in models.engines["chat"]:
        models.loop.run(engine.stop())
    assert wait_for(lambda: models.get("/ready").status_code == 503)


def test_failover_stays_within_the_model(make: Make) -> None:
    models = make(roles=("prefill", "decode", "decode"))
    first, second = models.engines["chat"][1:]
    first.dies = second.dies = True
    assert models.complete("chat").status_code >= 500
    assert len(first.bodies) + len(second.bodies) == 2  # both were tried
    second.dies = False
    for _ in range(8):
        assert models.complete("chat").status_code == 200
    assert not any(engine.bodies for engine in models.engines["org/code"])


def test_limits_and_pairing_of_each_model(make: Make) -> None:
    own = {
        "chat": {"limits": {"max_in_flight": 1, "max_queued": 0}},
        "org/code": {"limits": {"max_prompt_tokens": 50}, "pairing": {"local_prefill_tokens": 40}},
    }
    models = make(own=own)
    gate = models.decode("chat").gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(models.complete, "chat")
        assert wait_for(lambda: models.decode("chat").bodies)
        assert models.complete("chat").status_code == 429
        for _ in range(4):
            assert models.complete("org/code").status_code == 200
        gate.set()
        assert running.result(LIMIT_S).status_code == 200
    assert models.complete("chat", prompt="word " * 400).status_code == 200
    assert models.complete("org/code", prompt="word " * 400).status_code == 400
    # Short prompts are computed by decode, of this model alone.
    assert not models.engines["org/code"][0].bodies
    assert len(models.engines["chat"][0].bodies) == 2


# ---- what is seen -----------------------------------------------------------------------------


def test_metrics_tell_the_models_apart(models: Models) -> None:
    for name, count in (("chat", 2), ("org/code", 3)):
        for _ in range(count):
            models.complete(name)
    models.complete("other")
    samples = models.samples()
    requests = {
        (labels["deployment"], labels["status"]): value
        for name, labels, value in samples
        if name == "disagg_router_requests_total" and labels["route"] == "/v1/completions"
    }
    assert requests == {("chat", "200"): 2, ("org/code", "200"): 3, ("", "404"): 1}
    pairs = {
        (labels["deployment"], labels["prefill"], labels["decode"]): value
        for name, labels, value in samples
        if name == "disagg_router_pairings_total"
    }
    assert pairs == {
        ("chat", "chat/prefill-0", "chat/decode-0"): 2,
        ("org/code", "org/code/prefill-0", "org/code/decode-0"): 3,
    }
    engines = {labels["engine"] for name, labels, _ in samples if name == "disagg_leases_held"}
    assert len(engines) == 4
    assert [name for name, *_ in samples].count("disagg_build_info") == 1
    # Each series once, and its labels are always the same ones, as Ray's metrics need.
    keys = [(name, *sorted(labels.items())) for name, labels, _ in samples]
    assert len(keys) == len(set(keys))
    for family in {name for name, *_ in samples}:
        assert len({tuple(sorted(labels)) for name, labels, _ in samples if name == family}) == 1


def test_the_state_has_the_engines_of_all_models(models: Models) -> None:
    models.complete("chat")
    models.complete("org/code")
    state = models.get("/ui/state", headers=AS_OPERATOR).json()
    assert [engine["name"] for engine in state["engines"]] == [
        "chat/prefill-0",
        "org/code/prefill-0",
        "chat/decode-0",
        "org/code/decode-0",
    ]
    assert state["router"]["requests"] == {"200": 2.0}
    assert len(state["router"]["pairings"]) == 2


def test_the_access_log_names_the_model(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    models.complete("org/code")
    models.complete("other")
    out = ""

    def lines() -> list[dict[str, Any]]:
        nonlocal out
        out += capsys.readouterr().out
        return [json.loads(line) for line in out.splitlines()]

    assert wait_for(lambda: len(lines()) == 2)
    served, refused = lines()
    assert (served["deployment"], served["decode"]) == ("org/code", "org/code/decode-0")
    assert "deployment" not in refused


def test_engines_are_replaced_by_their_names(models: Models) -> None:
    known = models.server.app.state.replace
    kept = [one for one in endpoints_of(models) if one.name.startswith("org/code/")]
    down = {"chat/decode-0": Away("it restarts"), "chat/prefill-0": Away("it restarts")}

    async def replace() -> None:
        known(kept, down)

    models.loop.run(replace())
    ready = models.get("/ready").json()
    assert ready["engines"]["chat/decode-0"] == "it restarts"
    assert ready["models"] == {"chat": False, "org/code": True}
    assert models.complete("org/code").status_code == 200
    states = {one["name"]: one["state"] for one in models.get("/ui/state").json()["engines"]}
    assert states["chat/decode-0"] == "it restarts"


def endpoints_of(models: Models) -> Any:
    settings: RouterSection = models.server.app.state.settings
    return endpoints(settings.models)


def test_a_drain_concerns_all_models(models: Models) -> None:
    gate = models.decode("chat").gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(models.complete, "chat")
        assert wait_for(lambda: models.decode("chat").bodies)
        drain = models.post("/disagg/drain", None, headers=AS_OPERATOR)
        assert drain.json() == {"draining": True, "in_flight": 1}
        assert models.complete("org/code").status_code == 503
        gate.set()
        assert running.result(LIMIT_S).status_code == 200


def test_settings_that_name_no_decode_engine() -> None:
    section = {"models": [{"name": "a", "engines": {"prefill": ["http://a:1"]}}]}
    with pytest.raises(ConfigError, match=r"models\.0\.engines\.decode: empty"):
        endpoints(RouterSection.model_validate(section).models)
    section = {"models": [{"name": "a", "engines": {"decode": ["a:1"]}}]}
    with pytest.raises(ConfigError, match=r"models\.0\.engines\.decode: 'a:1' — has no scheme"):
        endpoints(RouterSection.model_validate(section).models)
