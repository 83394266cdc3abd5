"""Handoffs between engines on one GPU, token for token, over each transport that a GPU has: of a
finished prompt, and while it is still computed.

vLLM computes batch-invariantly here, so that equal blocks give equal tokens in bfloat16 too. CI has
no GPU; `make gpu` runs this where vLLM is installed.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from disagg.testing.checkpoint import make_model
from disagg.testing.vllm_server import VllmServer, token_ids
from engine import followed
from engine.conftest import running, transfer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="no cupy"),
    pytest.mark.timeout(600),
]
WAYS = ["cuda_ipc", "nccl", "tcp", "shared_storage"]
LENGTHS = [40, 130, 700, 2000, 5000, 9000, 12000, 15000]
STEP = 1024  # tokens that the producer computes at once
FOLLOWED = [40, STEP, STEP + 1, 2 * STEP + 1, 3000, 5000, 8 * STEP, 11000, 15 * STEP + 700]
# Room for six engines; NCCL refuses two ranks on one GPU unless it takes them for two hosts.
_ARGS = ("--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2 << 30))
_ENV = {
    "VLLM_BATCH_INVARIANT": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "DISAGG_SECRET": "of this test, not of others",
}
Engines = dict[str, VllmServer]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """By name: "alone" without a connector, "producer", and a consumer for each way. The producer
    alone computes prompts in several steps."""
    folder = tmp_path_factory.mktemp("gpu")
    model, storage = folder / "model", str(folder / "storage")
    make_model(model, layers=8, hidden=1024, kv_heads=8, head_dim=128, dtype="bfloat16")

    def engine(
        name: str, config: dict[str, object] | None, *more: str, step: int = 16384
    ) -> VllmServer:
        args = (*_ARGS, "--max-num-batched-tokens", str(step), *more)
        env = _ENV | {"NCCL_HOSTID": name}
        return VllmServer(name, model, folder / f"{name}.log", config, args, "bfloat16", env)

    made = {
        "alone": engine("alone", None),
        "producer": engine("producer", transfer("kv_producer", storage_path=storage), step=STEP),
    }
    for way in WAYS:
        config = transfer("kv_consumer", storage_path=storage, transports=[way])
        made[way] = engine(way, config, "--no-enable-prefix-caching")
    with running(list(made.values())):
        yield made


def prompt(seed: str, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 4000), k=tokens)


def handed_off(engines: Engines, way: str, tokens: list[int]) -> list[int]:
    params = engines["producer"].prefill(tokens)
    answer = engines[way].complete(tokens, max_tokens=32, kv_transfer_params=params)
    return token_ids(answer)[0]


def alone(engines: Engines, tokens: list[int]) -> list[int]:
    return token_ids(engines["alone"].complete(tokens, max_tokens=32))[0]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_one_engines(engines: Engines, way: str) -> None:
    before = engines[way].metric("disagg_handoffs_total", outcome="loaded", transport=way)
    for length in LENGTHS:
        tokens = prompt(f"{way} {length}", length)
        assert handed_off(engines, way, tokens) == alone(engines, tokens), length
    after = engines[way].metric("disagg_handoffs_total", outcome="loaded", transport=way)
    assert after - before == len(LENGTHS)


@pytest.mark.parametrize("way", WAYS)
def test_sixteen_at_once(engines: Engines, way: str) -> None:
    draw = random.Random(way)
    prompts = [prompt(f"{way} at once {n}", draw.randrange(200, 6000)) for n in range(32)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda tokens: handed_off(engines, way, tokens), prompts))
        expected = list(pool.map(lambda tokens: alone(engines, tokens), prompts))
    assert got == expected


# ---- while the prompt is computed ----------------------------------------------------------------


class Counted:
    """What one way's consumer counts from now on."""

    def __init__(self, engines: Engines, way: str) -> None:
        self._consumer, self._way = engines[way], way
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        consumer, way = self._consumer, self._way
        loaded = consumer.metric("disagg_handoffs_total", outcome="loaded", transport=way)
        return loaded, consumer.metric("disagg_handoff_hidden_bytes_total", transport=way)

    def since(self) -> tuple[float, float]:
        """Handoffs that were loaded, and bytes that came while prefill computed the prompt."""
        (loaded, hidden), (loaded_before, hidden_before) = self._now(), self._before
        return loaded - loaded_before, hidden - hidden_before


def followed_over(
    engines: Engines, way: str, tokens: list[int], invited: dict[str, object]
) -> list[int]:
    producer, consumer = engines["producer"], engines[way]
    answer = followed.handed_off(producer, consumer, tokens, invited, max_tokens=32)
    return token_ids(answer)[0]


@pytest.mark.parametrize("way", WAYS)
def test_followed(engines: Engines, way: str) -> None:
    """Also as the same blocks give that are fetched when all of them are computed."""
    counted, invited = Counted(engines, way), followed.invitation(engines["producer"])
    for length in FOLLOWED:
        tokens = prompt(f"{way} followed {length}", length)
        got = followed_over(engines, way, tokens, invited)
        assert got == handed_off(engines, way, tokens), length
        assert got == alone(engines, tokens), length
    loaded, hidden = counted.since()
    assert loaded == 2 * len(FOLLOWED)
    assert hidden > 0


@pytest.mark.parametrize("way", WAYS)
def test_sixteen_followed_at_once(engines: Engines, way: str) -> None:
    counted, invited = Counted(engines, way), followed.invitation(engines["producer"])
    draw = random.Random(f"{way} followed")
    prompts = [prompt(f"{way} followed at once {n}", draw.randrange(200, 6000)) for n in range(32)]
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda tokens: followed_over(engines, way, tokens, invited), prompts))
        expected = list(pool.map(lambda tokens: alone(engines, tokens), prompts))
    assert got == expected
    loaded, hidden = counted.since()
    assert loaded == len(prompts)
    assert hidden > 0
