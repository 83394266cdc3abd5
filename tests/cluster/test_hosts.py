"""A deployment over several hosts, each with a network, processes and memory of its own.

So the engines share neither memory, process ids nor loopback. A host can fall silent, like a host
that loses its power or its network.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from cluster.hosts import Host, Hosts, why_not
from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.vllm_server import CPU_ENV

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.slow,
    pytest.mark.timeout(420),
]
START_S, RAY_PORT, PORT = 240.0, 6379, 8000
BIN = Path(sys.executable).parent
HEAD, PREFILL, DECODES = "head", "prefills", ("decodes-1", "decodes-2")
TOKENS = 48


@dataclass
class Deployment:
    hosts: Hosts
    model: Path
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.hosts[HEAD].address}:{PORT}"

    def ask(self, ids: list[int], tokens: int = TOKENS, timeout_s: float = 45) -> list[int]:
        """The answer's tokens. The request comes from the router's host."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": tokens, "temperature": 0}
        more = {"ignore_eos": True, "return_token_ids": True}
        with self.hosts[HEAD].network():
            url = f"{self.url}/v1/completions"
            answer = client().post(url, json=body | more, timeout=timeout_s)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def streamed(self, ids: list[int]) -> str:
        """The text of a streamed answer, which must be complete."""
        body = {"model": "tiny", "prompt": ids, "max_tokens": TOKENS, "temperature": 0}
        more = {"ignore_eos": True, "stream": True}
        url = f"{self.url}/v1/completions"
        with (
            self.hosts[HEAD].network(),
            client().stream("POST", url, json=body | more, timeout=45) as answer,
        ):
            events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        assert events[-1] == "[DONE]", events[-1]
        return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    def counts(self) -> dict[str, float]:
        """The number of prompts that decode engines loaded, by transport."""
        found: dict[str, float] = {}
        time.sleep(1.1)  # the router reads the engines' counters at most once a second
        with self.hosts[HEAD].network():
            text = client().get(f"{self.url}/metrics", timeout=10).text
        for line in text.splitlines():
            if line.startswith("disagg_handoffs_total{") and 'outcome="loaded"' in line:
                way = line.split('transport="')[1].split('"')[0]
                found[way] = found.get(way, 0.0) + float(line.rpartition(" ")[2])
        return found


def until(
    log: Path, words: bytes, program: subprocess.Popen[bytes], wait_s: float = START_S
) -> None:
    deadline = time.monotonic() + wait_s
    while words not in log.read_bytes():
        assert program.poll() is None, f"it ended: {log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(0.2)


def start_ray(hosts: Hosts, host: Host, folder: Path) -> None:
    """Start Ray on one host, and wait until it runs.

    `ray start` gives up after 30 s, which pass soon beside other tests. It is then called again.
    """
    head = hosts[HEAD]
    words = [f"--address={head.address}:{RAY_PORT}", "--num-cpus=1"]
    if host is head:
        own = ["--head", f"--port={RAY_PORT}", f"--temp-dir={hosts.folder}"]
        words = [*own, "--include-dashboard=false", "--num-cpus=0"]
    words += [f"--node-ip-address={host.address}", f"--object-store-memory={80 << 20}"]
    argv = [str(BIN / "ray"), "start", "--block", f"--labels=host={host.name}", *words]
    for tries in range(3):
        log = folder / f"ray-{host.name}-{tries}.log"
        ray = host.start(argv, log, {"RAY_AUTH_MODE": "disabled"})
        try:
            until(log, b"Ray runtime started", ray)
            return
        except AssertionError:
            if tries == 2:
                raise


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The router on one host, a prefill engine on the next, decode engines on two others."""
    folder = tmp_path_factory.mktemp("hosts")
    model, file, log = folder / "tiny", folder / "hosts.yaml", folder / "serve.log"
    make_model(model)
    args = {"dtype": "float32", "block_size": 128, "max_model_len": 4096, "enforce_eager": True}
    decodes = f"in({','.join(DECODES)})"
    content: dict[str, Any] = {
        "name": "hosts",
        "model": {"path": str(model), "served_name": "tiny"},
        "engine": {"args": {**args, "num_gpu_blocks_override": 512}, "env": CPU_ENV},
        "prefill": {"resources": {"num_cpus": 1, "labels": {"host": PREFILL}}},
        "decode": {"replicas": 2, "resources": {"num_cpus": 1, "labels": {"host": decodes}}},
    }
    with Hosts([HEAD, PREFILL, *DECODES]) as hosts:
        head = hosts[HEAD]
        content["router"] = {"host": head.address, "port": PORT}
        content["ray"] = {"without_token": True}  # no other program is on this network
        file.write_text(yaml.safe_dump(content))
        for name in (HEAD, PREFILL, *DECODES):
            start_ray(hosts, hosts[name], folder)
        env = {"RAY_AUTH_MODE": "disabled", "RAY_ADDRESS": f"{head.address}:{RAY_PORT}"}
        serving = head.start([str(BIN / "disagg"), "serve", str(file)], log, env)
        until(log, b"Ready:", serving)
        yield Deployment(hosts, model, log)
        terminate(head, serving)


def terminate(host: Host, serving: subprocess.Popen[bytes]) -> None:
    """Send the signal to the program itself, not to the `nsenter` that started it."""
    for process in host.processes():
        if "serve" in process.cmdline() and process.ppid() == serving.pid:
            process.terminate()
    assert serving.wait(60) == 0


def prompt(number: int, length: int = 600) -> list[int]:
    """One of 200 prompts. Some end in half a character."""
    return [(7 * at + 13 * number) % 200 + 1 for at in range(length)]


def test_every_host_has_its_engine(deployment: Deployment) -> None:
    """Both decode engines would fit on one host, and labels allow both hosts."""
    text = deployment.log.read_text()
    places = {name: deployment.hosts[name].address for name in (PREFILL, *DECODES)}
    for name, address in places.items():
        assert f"http://{address}:" in text, f"no engine on {name}:\n{text}"


def test_prompts_cross_the_network(deployment: Deployment) -> None:
    """Over TCP, the only transport between hosts. The answers are those of transformers."""
    model = AutoModelForCausalLM.from_pretrained(deployment.model, dtype=torch.float32).eval()
    before = deployment.counts()
    for number, length in enumerate((130, 700, 2000)):
        ids = prompt(number, length)
        with torch.inference_mode():
            right = model.generate(
                torch.tensor([ids]), max_new_tokens=16, min_new_tokens=16, do_sample=False
            )
        assert deployment.ask(ids, 16) == right[0, length:].tolist()
    after = deployment.counts()
    assert {way for way in after if after[way] != before.get(way, 0.0)} == {"tcp"}
    assert after["tcp"] - before.get("tcp", 0.0) == 3


@dataclass
class Clients:
    """Clients that send requests all the time, each with a new prompt."""

    deployment: Deployment
    first: int
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    slowest_s: float = 0.0
    errors: list[str] = field(default_factory=list)

    @contextmanager
    def running(self, count: int) -> Iterator[None]:
        done = threading.Event()
        threads = [
            threading.Thread(target=self._ask, args=(each, done), daemon=True)
            for each in range(count)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join(60)

    def _ask(self, client: int, done: threading.Event) -> None:
        number = self.first + 67 * client
        while not done.is_set():
            number += 1
            began = time.monotonic()
            try:
                if number % 3:
                    self.texts[number] = self.deployment.streamed(prompt(number))
                else:
                    self.ids[number] = self.deployment.ask(prompt(number))
            except Exception as error:  # noqa: BLE001 - reported below
                self.errors.append(repr(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def check(self) -> None:
        """All requests were answered, with the same text as without a fault."""
        assert not self.errors
        assert len(self.texts) + len(self.ids) > 10
        with ThreadPoolExecutor(4) as pool:
            texts = pool.map(self.deployment.streamed, map(prompt, self.texts))
            ids = pool.map(self.deployment.ask, map(prompt, self.ids))
            assert dict(zip(self.texts, texts, strict=True)) == self.texts
            assert dict(zip(self.ids, ids, strict=True)) == self.ids


@pytest.mark.parametrize("name", [PREFILL, DECODES[0]])
def test_a_host_falls_silent(deployment: Deployment, name: str) -> None:
    """No request waits longer than it takes to notice the fault, and every answer is right."""
    clients = Clients(deployment, first=100 * (name == PREFILL))
    with clients.running(3):
        time.sleep(3)
        deployment.hosts.silence(name)
        time.sleep(11)
    deployment.hosts.hear(name)
    print(f"{name}: {len(clients.texts)} + {len(clients.ids)}; slowest {clients.slowest_s:.1f} s")
    clients.check()
