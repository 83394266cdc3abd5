"""`disagg bench faults` in short: ours under some kinds, and that the judge sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from disagg.chaos.faults.connectors import CONNECTORS, Connector
from disagg.chaos.faults.engines import Engines, Outcome
from disagg.chaos.faults.run import play
from disagg.testing.checkpoint import make_model
from disagg.testing.vllm_server import VllmServer
from engine.conftest import SLOW


@pytest.fixture(scope="module")
def engines(
    vllm_server: Callable[..., VllmServer], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    folder = tmp_path_factory.mktemp("faults")
    models = (folder / "model-0", folder / "model-1")
    for seed, model in enumerate(models):
        make_model(model, layers=2, hidden=256, kv_heads=2, head_dim=64, seed=seed)
    start = vllm_server("unused", models[0], None).start
    with Engines(CONNECTORS[0], models, folder, start) as engines:
        yield engines


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS[1:], ids=lambda connector: connector.name)
def test_the_driver_speaks_as_each_peer_expects(
    connector: Connector, engines: Engines, tmp_path: Path
) -> None:
    if connector.missing:
        pytest.skip(connector.missing)
    models, start = (engines.plain.model, engines.plain.model), engines.plain.start
    with connector.beside(tmp_path), Engines(connector, models, tmp_path, start) as peers:
        found = play(peers, "handoffs, one by one", 2)
    assert found["outcomes"] == {str(Outcome.RIGHT): 2}


@pytest.mark.parametrize(
    ("kind", "outcomes"),
    [
        ("handoffs, one by one", {Outcome.RIGHT: 2}),
        pytest.param("consumed reference", {Outcome.COMPUTED: 2}, marks=SLOW),
        ("another prompt's reference", {Outcome.COMPUTED: 2}),
        pytest.param("several prompts in a request", {Outcome.RIGHT: 2}, marks=SLOW),
        pytest.param("both directions at once", None, marks=SLOW),
        pytest.param("producer killed before the decode leg", {Outcome.COMPUTED: 2}, marks=SLOW),
        pytest.param("streamed: handoffs, one by one", {Outcome.RIGHT: 2}, marks=SLOW),
        pytest.param("streamed: consumer killed amid the prompt", {Outcome.RIGHT: 2}, marks=SLOW),
        ("streamed: decode's client leaves amid the prompt", {Outcome.COMPUTED: 2}),
        pytest.param(
            "streamed: prefill's cache reset amid the prompt", {Outcome.RIGHT: 2}, marks=SLOW
        ),
        ("streamed: another prompt's stream", {Outcome.COMPUTED: 2, Outcome.RIGHT: 2}),
    ],
)
def test_ours(engines: Engines, kind: str, outcomes: dict[Outcome, int] | None) -> None:
    found = play(engines, kind, 2)["outcomes"]
    if outcomes is None:  # which of the six have to be computed is a matter of time
        assert set(found) <= {Outcome.RIGHT, Outcome.COMPUTED}
        assert sum(found.values()) == 6
    else:
        assert found == {str(outcome): count for outcome, count in outcomes.items()}


@pytest.mark.slow
def test_blocks_that_nobody_gives_back_are_seen(engines: Engines, monkeypatch: Any) -> None:
    """Those of a lease that nobody fetches, before its time is over."""
    assert engines.kept() == []
    monkeypatch.setattr("disagg.chaos.faults.engines.KEPT_S", 0.5)
    engines.prefill(engines.prompts(200))
    assert engines.kept() == ["left"]
    monkeypatch.undo()
    assert engines.kept() == []


@pytest.mark.slow
def test_the_judge_sees_what_is_wrong(engines: Engines) -> None:
    prompt = engines.prompts(200)
    (right,) = expected = engines.expected(prompt)
    wrong = [[*right[:-1], right[-1] + 1]]
    assert engines.decode(prompt, engines.prefill(prompt), expected) == [Outcome.RIGHT]
    assert engines.decode(prompt, engines.prefill(prompt), wrong) == [Outcome.WRONG]
    refused: dict[str, Any] = {"temperature": -1}
    assert engines.decode(prompt, None, expected, **refused) == [Outcome.REFUSED]
    engines.kill(engines.right)
    assert engines.decode(prompt, None, expected) == [Outcome.DIED]
    assert engines.revive() == ["right"]
    assert engines.decode(prompt, engines.prefill(prompt), expected) == [Outcome.RIGHT]
