"""Several models behind one router, over HTTP, with fake engines."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from unit.router.conftest import AS_OPERATOR, wait_for
from unit.router.server.conftest import LIMIT_S, Models, StartModels

from disagg.config import RouterSection
from disagg.errors import ConfigError
from disagg.router.server.models import endpoints
from disagg.router.topology import Away

PAIRED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


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


def test_deployments_whose_models_have_other_names(start_models: StartModels) -> None:
    """As `disagg serve` names them: engines and metrics by deployment, requests by model."""
    models = start_models(
        deployments={"chat": ("talk", False), "org/code": ("code", True)},
        limits={"queue_timeout_s": 0.3},
    )
    assert models.listed() == ["chat", "org/code"]
    for name in ("chat", "org/code"):
        assert models.complete(name).status_code == 200
        assert len(models.decode(name).bodies) == 1
    for name in ("talk", "code"):
        refused = models.complete(name)
        assert refused.status_code == 404
        assert refused.json()["error"]["message"].endswith("there are: chat, org/code")
    ready = models.get("/ready").json()
    assert ready["models"] == {"talk": True, "code": True}
    assert "talk/decode-0" in ready["engines"]
    answered = {
        labels["deployment"]: value
        for name, labels, value in models.samples()
        if name == "disagg_router_requests_total" and labels["status"] == "200"
    }
    assert answered["talk"] == answered["code"] == 1
    # One of them is strict: prefill's failure is an error there, and there alone.
    for group in models.engines.values():
        group[0].status = 500
    assert models.complete("chat").status_code == 200
    refused = models.complete("org/code")
    assert refused.status_code == 502
    assert "transfer.strict" in refused.json()["error"]["message"]
    for engine in models.engines["chat"]:
        models.loop.run(engine.stop())
    assert wait_for(lambda: models.complete("chat").status_code == 503)


def test_a_single_model_that_is_named(start_models: StartModels) -> None:
    models = start_models(names=["chat"])
    assert models.complete("chat").status_code == 200
    refused = models.complete("other")
    assert refused.status_code == 404
    assert refused.json()["error"]["message"].endswith("there are: chat")
    assert models.listed() == ["chat"]
    assert models.get("/ready").json()["models"] == {"chat": True}


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


# ---- names -------------------------------------------------------------------------------------


def test_engines_without_their_model_are_told_of_once(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    models.decode("chat").model = "ch\x1bat"
    assert wait_for(lambda: models.listed() == ["ch\x1bat", "org/code"])
    for _ in range(3):
        models.loop.run(models.server.app.state.models.changed())
    told = [record.getMessage() for record in caplog.records if "list" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("engines of the model 'chat' list 'ch\\x1bat'")


def test_an_adapter_that_somebody_else_loaded_is_found(models: Models) -> None:
    assert models.complete("poet").status_code == 404
    models.decode("org/code").served.append("poet")  # through another router
    assert wait_for(lambda: models.complete("poet").status_code == 200)
    assert models.decode("org/code").bodies[-1]["model"] == "poet"


@pytest.mark.parametrize("name", ["x" * 300, "", 5, None, ["chat"]])
def test_an_odd_list_costs_nothing(models: Models, name: Any) -> None:
    models.decode("chat").model = name
    assert wait_for(lambda: models.listed() == ["org/code"])
    assert models.complete("chat").status_code == 200


# ---- failures ---------------------------------------------------------------------------------


def test_a_model_whose_engines_are_down_costs_itself_alone(start_models: StartModels) -> None:
    models = start_models(
        probe_interval_s=0.1, limits={"queue_timeout_s": 0.2, "connect_timeout_s": 1}
    )
    models.decode("chat").served.append("poet")
    assert wait_for(lambda: models.complete("poet").status_code == 200)
    for engine in models.engines["chat"]:
        models.loop.run(engine.stop())
    assert wait_for(lambda: not models.get("/ready").json()["models"]["chat"])
    ready = models.get("/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"chat": False, "org/code": True})
    assert wait_for(lambda: models.complete("poet").status_code == 503)
    for name in ("chat", "poet"):  # not 404: the name is known
        for path in PAIRED:
            refused = models.post(path, {"model": name, "prompt": "x"})
            # 429 if a rest of the engine ends while the request waits.
            assert refused.status_code in (503, 429)
            assert refused.json()["error"]["message"]
    assert models.complete("org/code").status_code == 200
    assert wait_for(lambda: models.listed() == ["org/code"])
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


def test_failover_stays_within_the_model(start_models: StartModels) -> None:
    models = start_models(roles=("prefill", "decode", "decode"))
    first, second = models.engines["chat"][1:]
    first.dies = second.dies = True
    assert models.complete("chat").status_code >= 500
    assert len(first.bodies) + len(second.bodies) == 2  # both were tried
    second.dies = False
    for _ in range(8):
        assert models.complete("chat").status_code == 200
    assert not any(engine.bodies for engine in models.engines["org/code"])


def test_limits_and_pairing_of_each_model(start_models: StartModels) -> None:
    own = {
        "chat": {"limits": {"max_in_flight": 1, "max_queued": 0}},
        "org/code": {"limits": {"max_prompt_tokens": 50}, "pairing": {"local_prefill_tokens": 40}},
    }
    models = start_models(own=own)
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
