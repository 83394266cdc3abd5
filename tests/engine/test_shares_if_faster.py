"""`share_caches: if_faster` over links of several speeds: an engine fetches a prefix from another
engine where that is faster than to compute it, as a clock says.

All is on a network of its own, whose loopback is as fast as the link. The KV cache makes nearly all
of its bytes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.network import Network, bits_per_s, run, why_not
from disagg.testing.vllm_server import VllmServer, completion, token_ids
from disagg.vllm_compat import versions
from engine.conftest import routed, running, transfer
from engine.test_cache_aware import Engine, ids, metric, settled

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(versions.matches("<0.31"), reason="this vLLM does not tell its ports"),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]
LINKS = ("40Mbit", "200Mbit", "10Gbit")
PREFIXES = (64, 512, 2048)
NEW = 40
REPEATS = 3
CLEAR, CLEAR_S = 1.5, 0.3
"""What is so many times faster, and so many seconds, must be chosen. Nearer to where both take as
long, chance decides: both are measured while they run."""


@dataclass(frozen=True)
class Scene:
    """`source` holds prefixes, and decodes. `engine` prefills."""

    network: Network
    source: Engine
    engine: Engine

    def pace(self, rate: str) -> None:
        speed = bits_per_s(rate)
        bucket = max(256 << 10, speed // 8 // 500)
        with self.network.inside():
            words = f"rate {speed}bit burst {bucket} latency 200ms"
            run(f"tc qdisc replace dev lo root tbf {words}")

    def routed(self, how: str) -> Any:
        addresses = {
            one.url: {"endpoint": one.events, "replay_endpoint": one.replay}
            for one in (self.source, self.engine)
        }
        pairing = {
            "prefill": "cache_aware",
            "share_caches": how,
            "local_prefill_tokens": 0,
            "follow": False,
        }
        return routed(
            [self.engine],
            [self.source],
            engines={"kv_events": addresses},
            pairing=pairing,
            access_log=False,
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("shares")
    model = folder / "model"  # 32 KiB of KV cache a token
    make_model(model, layers=4, hidden=512, kv_heads=8, head_dim=128)
    network = Network()

    def server(name: str, model: Path, log: Path, config: Any, **more: Any) -> VllmServer:
        return VllmServer(name, model, log, config, **more)

    with network.inside():  # whatever is started here is on that network
        config = transfer("kv_both", transports=["tcp"], host="127.0.0.1")
        both = [
            Engine(server, model, folder / f"{name}.log", name, config, blocks=256)
            for name in ("source", "engine")
        ]
        for one in both:
            one.server.env["TMPDIR"] = str(folder)  # one secret
        with running([one.server for one in both]):
            for one in both:
                one.find()
            yield Scene(network, *both)
    network.close()


def ask(url: str, prompt: list[int]) -> tuple[float, bool, list[int]]:
    """Seconds to the end of an answer of one token, whether a prefix was fetched, and the token."""
    before, began = leased(url), time.monotonic()
    body = {"model": "tiny", **completion(prompt, max_tokens=1)}
    answer = client().post(f"{url}/v1/completions", json=body, timeout=120)
    taken = time.monotonic() - began
    assert answer.status_code == 200, answer.text
    (tokens,) = token_ids(answer.json())
    settled(url)
    return taken, leased(url) > before, tokens


def leased(url: str) -> float:
    return metric(url, "disagg_router_sources_total", outcome="leased")


@pytest.mark.parametrize("rate", LINKS)
def test_what_is_faster_is_chosen(scene: Scene, rate: str) -> None:
    """For each length of a prefix that the source holds: fetched always, never, and if faster."""
    generator = random.Random(LINKS.index(rate))
    scene.pace(rate)

    def held(length: int) -> list[int]:
        """A prompt whose first tokens the source has."""
        prefix = ids(generator, length)
        scene.source.ask(prefix)
        return [*prefix, *ids(generator, NEW)]

    with scene.network.inside():
        taken: dict[str, dict[int, float]] = {}
        chosen: dict[int, list[bool]] = {}
        for how in ("never", "always", "if_faster"):
            with scene.routed(how) as url:
                settled(url)
                if how == "if_faster":  # it measures how fast engines compute, and fetch
                    for length in (512, 512, 1024):
                        ask(url, ids(generator, length))
                    for length in (1024, 512):
                        ask(url, held(length))
                for length in PREFIXES:
                    times, fetched = [], []
                    for _ in range(REPEATS):
                        prompt = held(length)
                        settled(url)
                        seconds, was_fetched, tokens = ask(url, prompt)
                        times.append(seconds)
                        fetched.append(was_fetched)
                        (right,) = token_ids(scene.source.server.complete(prompt, max_tokens=1))
                        assert tokens == right
                    taken.setdefault(how, {})[length] = sorted(times)[REPEATS // 2]
                    if how == "if_faster":
                        chosen[length] = fetched
                    else:
                        assert fetched == [how == "always"] * REPEATS
        for length in PREFIXES:
            computed, moved = taken["never"][length], taken["always"][length]
            print(
                f"| {rate} | {length} | {computed * 1000:.0f} | {moved * 1000:.0f} | "
                f"{taken['if_faster'][length] * 1000:.0f} | {sum(chosen[length])} of {REPEATS} |"
            )
        for length in PREFIXES:
            computed, moved = taken["never"][length], taken["always"][length]
            if abs(moved - computed) < CLEAR_S:
                continue
            if moved * CLEAR < computed:
                assert sum(chosen[length]) >= REPEATS - 1, f"{length} tokens: a move is faster"
            elif computed * CLEAR < moved:
                assert sum(chosen[length]) <= 1, f"{length} tokens: computing is faster"
