"""`disagg serve` as a user runs it: a subprocess, a private Ray, real engines on the CPU.

Engine starts dominate the time (about a minute each on two cores). So each test that needs engines
checks several things. It notes the processes and files that must be gone after the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from cluster.browser import CHROMIUM, browser
from cluster.titles import title
from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.ports import free_port

START_S = 240
STOP_S = 15

pytestmark = pytest.mark.timeout(START_S + 60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make_model(folder)
    return folder


@contextmanager
def temporary() -> Iterator[Path]:
    """A temporary folder for one deployment, with a path short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="dt-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@dataclass
class Served:
    """One `disagg serve` in a subprocess."""

    process: subprocess.Popen[bytes]
    out: Path
    temp: Path
    seen: set[psutil.Process] = field(default_factory=set)
    segments: set[str] = field(default_factory=set)

    @property
    def text(self) -> str:
        return self.out.read_text()

    def until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, self.text
            time.sleep(0.2)

    def until_shown(self, word: str) -> None:
        self.until(lambda: word in self.text or self.process.poll() is not None, START_S)
        assert word in self.text, self.text

    def note(self) -> None:
        """Remember the processes and segments that must be gone later."""
        self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
        self.segments |= {name for process in self.seen for name in segments(process.pid)}

    def end(self, signum: int, *, group: bool = False) -> float:
        """Signal it, or all of its process group, as supervisors do, and wait for its end. Returns
        the seconds that took."""
        self.note()
        began = time.monotonic()
        if group:
            os.killpg(self.process.pid, signum)
        else:
            self.process.send_signal(signum)
        self.process.wait(STOP_S)
        return time.monotonic() - began

    def check_nothing_left(self) -> None:
        assert [p for p in self.seen if p.is_running() and p.status() != "zombie"] == []
        assert [name for name in self.segments if Path("/dev/shm", name).exists()] == []
        left = [path for path in self.temp.rglob("*") if not path.is_dir()]
        assert left == []


def segments(pid: int) -> set[str]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {
        line.partition("/dev/shm/")[2]
        for line in maps.splitlines()
        if "/dev/shm/" in line and "(deleted)" not in line
    }


DISAGG = [sys.executable, "-c", "from disagg.cli import main; main()"]


def launch(folder: Path, temp: Path, name: str, content: dict[str, Any]) -> Served:
    file, out = folder / f"{name}.yaml", folder / f"{name}.out"
    file.write_text(yaml.safe_dump(content))
    with out.open("wb") as log:
        process = subprocess.Popen(
            [*DISAGG, "serve", str(file)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(temp)},
            start_new_session=True,
        )
    return Served(process, out, temp)


def end(served: Served) -> None:
    if served.process.poll() is None:
        served.process.terminate()
        served.process.wait(STOP_S)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    started: list[Served] = []

    def go(content: dict[str, Any], temp: Path | None = None) -> Served:
        started.append(launch(tmp_path, temp or own, str(len(started)), content))
        return started[-1]

    with temporary() as own:
        yield go
        for served in started:
            end(served)


@pytest.fixture(scope="module", autouse=True)
def beside(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, int]]:
    """A deployment that serves while others of the same name are interrupted, fail and die."""
    port = free_port()
    with temporary() as temp:
        folder = tmp_path_factory.mktemp("beside")
        served = launch(folder, temp, "beside", deployment(model, port))
        yield served, port
        end(served)


@pytest.fixture(scope="module", autouse=True)
def broken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A deployment whose engines fail to start, after a while."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(model, folder / "model")
    file = folder / "model" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    with temporary() as temp:
        served = launch(folder, temp, "broken", deployment(folder / "model"))
        yield served
        end(served)


def deployment(model: Path, port: int = 0) -> dict[str, Any]:
    return {
        "name": "test",
        "model": {"path": str(model), "served_name": "tiny"},
        "engine": {
            "args": {
                "dtype": "float32",
                "max_model_len": 2048,
                "block_size": 128,
                "num_gpu_blocks_override": 64,
            },
            "env": {"VLLM_CPU_KVCACHE_SPACE": "1"},
            "hang_timeout_s": 20,
        },
        # There may be more engines than cores, so they share cores.
        "prefill": {"resources": {"num_cpus": 0}},
        "decode": {"resources": {"num_cpus": 0}},
        "router": {
            "port": port,
            "pairing": {"local_prefill_tokens": 0, "first_token": "prefill"},
        },
    }


def listening(port: int) -> psutil.Process:
    """The process that listens on this port."""
    found = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return psutil.Process(next(c.pid for c in found if c.laddr and c.laddr.port == port))


def actor_of(served: Served, name: str) -> psutil.Process:
    """The process of the engine's actor, which serves HTTP."""
    shown = re.findall(rf"{name}\b.* http://127\.0\.0\.1:(\d+)", served.text)
    assert shown, served.text
    return listening(int(shown[-1]))


def actor_named(served: Served, name: str) -> psutil.Process:
    """The oldest process of an actor, found by its class: Ray makes it the process's title."""
    below = psutil.Process(served.process.pid).children(recursive=True)
    found = [process for process in below if f"ray::{name}" in title(process)]
    return min(found, key=lambda process: process.create_time())


def core_of(served: Served, name: str) -> psutil.Process:
    """vLLM's engine process."""
    # Found by its command line: vLLM does not always set its title.
    children = {child: title(child) for child in actor_of(served, name).children()}
    found = [c for c, line in children.items() if "spawn_main" in line or "EngineCore" in line]
    assert len(found) == 1, children
    return found[0]


def complete(port: int, prompt: str = "the quick brown fox ", **headers: str) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt * 50, "max_tokens": 4}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


@pytest.mark.slow
def test_interrupt_while_loading_leaves_nothing(run: Callable[..., Served], model: Path) -> None:
    served = run(deployment(model))
    served.until_shown("starting its processes")
    assert served.end(signal.SIGINT) < STOP_S
    assert served.process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in served.text
    served.check_nothing_left()


def test_engine_that_cannot_start_says_why(broken: Served) -> None:
    if broken.process.poll() is None:
        broken.note()
    assert broken.process.wait(START_S) == 1
    last = broken.text.strip().splitlines()[-1]
    assert "did not start" in last
    assert "NoSuchModel" in last
    broken.check_nothing_left()


def handed_over(port: int, engine: str = "") -> float:
    """To all decode engines, or to this one."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    words = ("disagg_handoffs_total{", 'outcome="loaded"', f'engine="{engine}')
    loaded = [line for line in lines if all(word in line for word in words)]
    return sum(float(line.rpartition(" ")[2]) for line in loaded)


def shown_by_ray(served: Served, name: str, **labels: str) -> float | None:
    """A sample from Ray's metrics endpoint, found as a cluster's Prometheus finds it."""
    file = next(served.temp.rglob("prom_metrics_service_discovery.json"))
    node = json.loads(file.read_text())[0]["targets"][0]
    with urllib.request.urlopen(f"http://{node}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return next((s.value for s in samples if labels.items() <= s.labels.items()), None)


def who_logged(served: Served, word: str) -> set[str]:
    """The classes of actors whose log in Ray's folder contains this word."""
    logs = [path.read_text() for path in served.temp.rglob("logs/worker-*.out")]
    return {log.partition(":actor_name:")[2].split()[0] for log in logs if word in log}


def states(port: int) -> dict[str, str]:
    """The state of each engine, from the router."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/ui/state", timeout=60) as response:
        return {engine["name"]: engine["state"] for engine in json.load(response)["engines"]}


def test_a_chat_begins_with_prefills_token(beside: tuple[Served, int]) -> None:
    served, port = beside
    served.until_shown("Ready: ")
    options = {"model": "tiny", "temperature": 0, "max_tokens": 12}
    said = {"role": "user", "content": "the lazy dog sees a quick brown fox " * 40}
    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        talk = partial(client.chat.completions.create, messages=[said], **options)
        served.until(lambda: bool(list(talk(stream=True))) and begun_at_prefill(port) > 0, 30)
        before, whole = begun_at_prefill(port), talk()
        events: list[Any] = list(talk(stream=True, stream_options={"include_usage": True}))
    assert begun_at_prefill(port) == before + 1
    choices = [choice for event in events for choice in event.choices]
    assert choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for choice in choices)
    assert text == whole.choices[0].message.content
    assert choices[-1].finish_reason == whole.choices[0].finish_reason
    assert len({event.id for event in events}) == 1
    assert whole.usage is not None
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def begun_at_prefill(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    name = "disagg_router_first_tokens_from_prefill_total "
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_what_dies_comes_back(beside: tuple[Served, int]) -> None:
    served, port = beside
    served.until_shown("Ready: ")
    served.note()
    complete(port)
    core_of(served, "prefill-0").suspend()
    served.until(lambda: "503" in states(port)["prefill-0"], 15)
    assert complete(port)["usage"]["completion_tokens"] == 4, "decode computes alone"

    decode = actor_of(served, "decode-0")
    actor_named(served, "SupervisorActor").kill()
    decode.kill()
    served.until_shown("the supervisor died")
    scaling = command(served, "scale", "prefill=1")
    served.until_shown("the supervisor is back")
    served.until_shown("engine decode-0 died")
    first = served.text.index("engine decode-0 died")
    assert first < served.text.index("the supervisor is back"), "no fallback handled the engine"
    assert states(port)["decode-0"] == "starts again"
    body = {"model": "tiny", "prompt": "waits for the engine, if it is not too slow"}
    late = client().post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert late.status_code == 200 or "starts again" in late.json()["error"]["message"]
    served.until_shown("engine prefill-0 died: vLLM's engine process made no progress for 20 s")
    for name in ("prefill-0", "decode-0"):
        served.until_shown(f"{name} is back")
    said = scaling.communicate(timeout=60)[0]
    assert scaling.returncode == 0, f"a command waits for the new supervisor: {said}"
    before = handed_over(port)
    complete(port, "of another prompt than before ")
    served.until(lambda: handed_over(port) == before + 1, 15)

    listening(port).kill()
    served.until_shown("the router is back")
    complete(port, "and of a third one, for all to hear ", **{"x-request-id": "the-third"})
    served.until(lambda: handed_over(port) == before + 2, 15)
    asked = {"RouterActor", "PrefillEngine", "DecodeEngine"}
    served.until(lambda: who_logged(served, '"id":"the-third"') >= asked, 15)
    assert served.text.count("is back:") == 2, "the engines did not notice"
    served.note()


def command(served: Served, *words: str) -> subprocess.Popen[str]:
    """`disagg scale …` or another command, for the deployment in this temporary folder."""
    return subprocess.Popen(
        [*DISAGG, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TMPDIR": str(served.temp)},
    )


def apply(served: Served, folder: Path, content: dict[str, Any]) -> tuple[str, int]:
    """The output of `disagg apply` for this content, and its exit status."""
    file = folder / "changed.yaml"
    file.write_text(yaml.safe_dump(content))
    applying = command(served, "apply", str(file))
    said = applying.communicate(timeout=START_S)[0]
    return said, applying.returncode


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_rays_dashboard_shows_who_does_what(beside: tuple[Served, int]) -> None:
    served, _ = beside
    served.until_shown("Ready: ")
    url = re.findall(r"Ray's dashboard: (\S+)", served.text)[0]
    token = re.findall(r"a token once: the content of (\S+)", served.text)
    with browser() as page:
        page.open(f"{url}/#/actors")
        if token:
            page.until_shown("Authentication Token Required")
            page.type(Path(token[0]).read_text().strip())
            page.click("Submit")
        page.until_shown("prefill-0", "PrefillEngine", "decode-0", "DecodeEngine", "RouterActor")
        for name in ("prefill-0", "decode-0", "router"):
            page.open(f"{url}/#/actors")
            page.until_shown("prefill-0", "decode-0", "router")
            row = f"[...document.querySelectorAll('tr')].find(r => r.innerText.includes('{name}'))"
            page.open(page.look(f"{row}.querySelector('a').href"))
            page.until_shown("STDOUT")
            page.click("stdout")
            page.until_shown(":actor_name:")  # its log; lines out of sight are not in the page


@pytest.mark.slow
def test_two_side_by_side_and_one_dies(
    run: Callable[..., Served], model: Path, beside: tuple[Served, int], tmp_path: Path
) -> None:
    """Two deployments with one name, temporary folder and machine do not affect each other.

    Meanwhile the living deployment gets one more engine, and gives it up again.
    """
    living, living_port = beside
    living.until_shown("Ready: ")
    complete(living_port)  # by the only decode engine
    scaling = command(living, "scale", "decode=2")
    dying_port = free_port()
    mortal = deployment(model, dying_port)
    mortal["engine"]["max_restarts"] = 0
    dying = run(mortal, living.temp)
    dying.until_shown("importing vLLM")
    clash = run(deployment(model, dying_port), living.temp)
    assert clash.process.wait(60) == 2
    assert "router.port" in clash.text

    for served, port in ((living, living_port), (dying, dying_port)):
        served.until_shown("Ready: ")
        served.note()
        assert f"http://127.0.0.1:{port}/v1" in served.text
        assert complete(port)["usage"]["completion_tokens"] == 4
    core_of(dying, "decode-0").kill()
    assert dying.process.wait(30) == 1
    last = dying.text.strip().splitlines()[-1]
    assert "decode-0 died: vLLM's engine process died" in last
    assert "engine.max_restarts" in last
    assert [p for p in dying.seen if p.is_running() and p.status() != "zombie"] == []

    said = scaling.communicate(timeout=START_S)[0]
    assert scaling.returncode == 0, said
    assert "decode-1 serves" in said
    assert states(living_port) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "up")
    living.note()
    decode = {"deployment": "test", "engine": "decode-0", "role": "decode", "model_name": "tiny"}
    moved, loaded = handed_over(living_port, "decode-0"), {**decode, "outcome": "loaded"}
    assert moved
    said, status = apply(living, tmp_path, deployment(model, dying_port))
    assert status == 2, said
    assert f"router.port: {living_port} -> {dying_port}" in said
    broken = deployment(model, living_port)
    broken["engine"]["args"]["hf_overrides"] = {"architectures": ["NoSuchModel"]}
    said, status = apply(living, tmp_path, broken)
    assert status == 1, said
    assert re.search("the change is taken back: engine .*NoSuchModel", said), said
    assert states(living_port) == dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "up")
    scaling = command(living, "scale", "decode=1")
    said = scaling.communicate(timeout=60)[0]
    assert scaling.returncode == 0, said
    assert "decode-1 is idle and ends" in said
    assert states(living_port) == dict.fromkeys(("prefill-0", "decode-0"), "up")

    shown = partial(shown_by_ray, living, "ray_disagg_handoffs_total", **loaded)
    living.until(lambda: shown() == moved, START_S)
    assert shown_by_ray(living, "ray_vllm_generation_tokens_total", **decode)
    answered = {"deployment": "test", "route": "/v1/completions", "status": "200"}
    assert shown_by_ray(living, "ray_disagg_router_requests_total", **answered)
    up = {"deployment": "test", "engine": "decode-0", "role": "decode"}
    assert shown_by_ray(living, "ray_disagg_router_engine_up", **up) == 1
    assert complete(living_port)["usage"]["completion_tokens"] == 4
    for words, expected in (
        (("ls",), ("test", "serves", f"http://127.0.0.1:{living_port}")),
        (("status", "test"), ("prefill-0", "decode-0")),
        (("logs", "test", "--lines", "5"), ("prefill-0  ", "decode-0  ")),
        (("logs", "--engine", "decode-7"), ("there are: decode-0, prefill-0",)),
    ):
        said = command(living, *words).communicate(timeout=60)[0]
        assert all(word in said for word in expected), said
    assert living.end(signal.SIGTERM, group=True) < STOP_S
    assert living.process.returncode == 0
    assert living.segments, "an engine has shared memory, or this test looks in the wrong place"
    dying.check_nothing_left()
    living.check_nothing_left()
