"""A data parallel group of a mixture of experts whose ranks are on two hosts.

So each step's experts cross the network, and the ranks meet at an address of another host. Each
host's own name leads to itself only, as on many machines.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import yaml

from cluster.hosts import Hosts, why_not
from cluster.test_data_parallel import Reference
from cluster.test_hosts import (
    BIN,
    HEAD,
    PORT,
    RAY_PORT,
    Deployment,
    start_ray,
    terminate,
    until,
)
from disagg.testing.vllm_server import CPU_ENV
from engine.windows import make_experts

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]
HOSTS, TOKENS = ("one", "two", "three"), 16
START_S, ANSWER_S = 600.0, 120.0
RANKS = ("prefill-0", "prefill-1")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Reference]]:
    """Two ranks for three hosts, of which each has room for one."""
    folder = tmp_path_factory.mktemp("hosts")
    model, file, log = folder / "model", folder / "group.yaml", folder / "serve.log"
    make_experts(model)
    args = {"dtype": "float32", "block_size": 128, "max_model_len": 2048, "enforce_eager": True}
    content: dict[str, Any] = {
        "name": "group",
        "model": {"path": str(model), "served_name": "tiny"},
        "engine": {
            "args": {**args, "num_gpu_blocks_override": 64},
            "env": CPU_ENV,
            "hang_timeout_s": 30,
        },
        "prefill": {
            "resources": {"num_cpus": 1},
            "args": {"data_parallel_size": 2, "enable_expert_parallel": True},
        },
        "decode": {"resources": {"num_cpus": 0, "labels": {"host": HEAD}}},
    }
    with Hosts([HEAD, *HOSTS]) as hosts:
        head = hosts[HEAD]
        content["router"] = {
            "host": head.address,
            "port": PORT,
            "pairing": {"local_prefill_tokens": 0},
        }
        content["ray"] = {"without_token": True}  # no other program is on this network
        file.write_text(yaml.safe_dump(content))
        for name in (HEAD, *HOSTS):
            start_ray(hosts, hosts[name], folder)
        env = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{head.address}:{RAY_PORT}"}
        serving = head.start([str(BIN / "disagg"), "serve", str(file)], log, env)
        until(log, b"Ready:", serving, START_S)
        yield Deployment(hosts, model, log), Reference(model)
        terminate(head, serving)


def hosts_of_ranks(deployment: Deployment) -> dict[str, str]:
    """The host on which each rank serves, from the log."""
    names = {deployment.hosts[name].address: name for name in (HEAD, *HOSTS)}
    found = re.findall(r"(prefill-\d).* http://([\d.]+):", deployment.log.read_text())
    return {rank: names[address] for rank, address in found}


def prompts(count: int, seed: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [
        [chance.randrange(300, 1000) for _ in range(chance.randint(200, 900))] for _ in range(count)
    ]


def check(deployment: Deployment, reference: Reference, asked: list[list[int]]) -> None:
    """Ask all at once. Each answer is that of transformers."""
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda ids: deployment.ask(ids, TOKENS, ANSWER_S), asked))
    assert answers == [reference.answer(ids, TOKENS) for ids in asked]


def test_ranks_on_two_hosts(deployment: tuple[Deployment, Reference]) -> None:
    served, reference = deployment
    found = hosts_of_ranks(served)
    assert set(found) == set(RANKS)
    assert len(set(found.values())) == 2
    check(served, reference, prompts(8, 1))
    assert served.counts() == {"tcp": 8}


@pytest.mark.parametrize("rank", [1, 0])
def test_a_ranks_host_dies(deployment: tuple[Deployment, Reference], rank: int) -> None:
    """Its power is cut in the middle of requests. The other rank ends with it, and both are back on
    the hosts that are left; without a second host, the group waits for one."""
    served, reference = deployment
    before, seen = hosts_of_ranks(served), len(served.log.read_text())
    asked = prompts(6, 2 + rank)
    with ThreadPoolExecutor(len(asked)) as pool:
        streams = [pool.submit(served.ask, ids, TOKENS, ANSWER_S) for ids in asked]
        time.sleep(0.1)
        served.hosts.power_off(before[RANKS[rank]])
        answers = [stream.result() for stream in streams]
    assert answers == [reference.answer(ids, TOKENS) for ids in asked]

    def said(word: str) -> bool:
        return word in served.log.read_text()[seen:]

    began = time.monotonic()
    while not (said("of its data parallel group ends with it") and said("needs 2 CPU in 2 bundles")
               if rank == 0 else all(said(f"{name} is back") for name in RANKS)):  # fmt: skip
        assert time.monotonic() - began < START_S, served.log.read_text()
        time.sleep(0.5)
    check(served, reference, prompts(4, 5 + rank))
    if rank:
        after = hosts_of_ranks(served)
        assert len(set(after.values())) == 2
        assert before[RANKS[1]] not in after.values()
