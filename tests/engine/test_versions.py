"""Engines of two versions of vLLM: the same blocks, and handoffs in both directions.

For `make matrix`, which names the other version's Python in DISAGG_TEST_OTHER_VLLM.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors

from disagg.testing.vllm_server import Started, VllmServer, token_ids
from disagg.testing.waiting import eventually
from engine.conftest import beside, running, tiers, transfer

OTHER = os.environ.get("DISAGG_TEST_OTHER_VLLM", "")
pytestmark = pytest.mark.skipif(not OTHER, reason="with `make matrix` alone")
Prompt = Callable[[int], list[int]]
BLOCK = 128


def spawn_other(args: Sequence[str], env: dict[str, str], log: Path) -> Started:
    """Start the other version's server."""
    command = [OTHER, "-m", "vllm.entrypoints.openai.api_server", *args]
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


@dataclass(frozen=True)
class Versions:
    """other, ours: engines that prefill and decode, each with tiers in a folder of its own.
    single: ours without a connector."""

    other: VllmServer
    ours: VllmServer
    single: VllmServer
    files: dict[str, Path]


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Versions]:
    logs, temporary = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("tmp")
    files = {name: tmp_path_factory.mktemp(name) for name in ("other", "ours")}
    blocks = ("--num-gpu-blocks-override", "320", "--max-model-len", "8192")

    def server(name: str) -> VllmServer:
        config = None
        if name in files:
            kept = tiers(host_bytes=1 << 26, directory=str(files[name]))
            config = beside(transfer("kv_both", transports=["tcp"]), kept)
        made = VllmServer(name, model, logs / f"{name}.log", config, blocks)
        made.env = {"TMPDIR": str(temporary)}  # with the secret that engines share
        if name == "other":
            made.start = spawn_other
        return made

    made = Versions(server("other"), server("ours"), server("single"), files)
    with running([made.other, made.ours, made.single]):
        yield made


def loads(engine: VllmServer) -> float:
    return engine.metric("disagg_handoffs_total", transport="tcp", outcome="loaded")


def stored(folder: Path) -> dict[str, dict[str, bytes]]:
    """The chunks of a directory tier: by namespace and key, the bytes of each layer."""
    return {
        str(path.relative_to(folder)): {
            name: bytes(tensor["data"])
            for name, tensor in safetensors.deserialize(path.read_bytes())
        }
        for path in folder.rglob("*.safetensors")
    }


def test_the_other_engine_is_of_another_version(versions: Versions) -> None:
    assert versions.other.log is not None
    seen = {one.name: one.log.read_text() for one in (versions.other, versions.ours) if one.log}
    found = {name: text.partition("version ")[2].split()[0] for name, text in seen.items()}
    assert found["other"] != found["ours"]


def test_blocks_are_the_same_bytes(versions: Versions, prompt: Prompt) -> None:
    """Of a prompt that each engine computes itself: same keys, same fingerprint, same bytes."""
    ids = prompt(BLOCK * 8 + 5)
    for engine in (versions.other, versions.ours):
        engine.complete(ids)
    assert eventually(lambda: all(len(stored(f)) >= 8 for f in versions.files.values()), 30)
    other, ours = stored(versions.files["other"]), stored(versions.files["ours"])
    assert other == ours


@pytest.mark.parametrize("length", [2, 127, 128, 129, 640, 3000])
@pytest.mark.parametrize("prefill", ["other", "ours"])
def test_handoffs_between_versions(
    versions: Versions, prompt: Prompt, prefill: str, length: int
) -> None:
    producer, consumer = versions.other, versions.ours
    if prefill == "ours":
        producer, consumer = consumer, producer
    ids, before = prompt(length), loads(consumer)
    answer = consumer.complete(ids, kv_transfer_params=producer.prefill(ids))
    assert loads(consumer) == before + 1
    assert token_ids(answer) == token_ids(versions.single.complete(ids))
