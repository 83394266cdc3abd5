"""Plain vLLM servers as subprocesses: vLLM's own `api_server`, without Ray and router.

The demo compares with them, the benchmarks measure them, the tests use them. CPU engines only.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from disagg.engine.vllm_patches.busy_poll import POLL_SLEEP_ENV, POLL_SLEEP_US
from disagg.errors import StartupError
from disagg.router.api.bodies import REMOTE_DECODE
from disagg.testing.http import client
from disagg.testing.ports import free_port

START_S = 600.0
HOLD_OPTION = "hold_file"
"""The option of `HeldScheduler` in `--additional-config`: its hold file's path."""

CPU_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONFAULTHANDLER": "1",
    POLL_SLEEP_ENV: POLL_SLEEP_US,
}


class Started(Protocol):
    """The used part of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The leader of its own process group."""
        ...

    def poll(self) -> int | None:
        """None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises `subprocess.TimeoutExpired`."""
        ...


def spawn(
    args: Sequence[str], env: dict[str, str], log: Path, before: Sequence[str] = ()
) -> Started:
    """Start vLLM's server with these arguments, as in its documentation. before: of its command."""
    command = [*before, sys.executable, "-m", "vllm.entrypoints.openai.api_server", *args]
    with log.open("wb") as out:
        return subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


@dataclass
class VllmServer:
    """One `vllm.entrypoints.openai.api_server` process and its API.

    block_size: tokens; None: vLLM's own choice. can_hold: see `followed_legs.held_at`.
    """

    name: str
    model: Path
    log: Path | None = None
    transfer: dict[str, Any] | None = None
    args: Sequence[str] = ()
    dtype: str = "float32"
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    block_size: int | None = 128
    can_hold: bool = False
    process: Started | None = None
    start: Callable[[Sequence[str], dict[str, str], Path], Started] = spawn
    _folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> VllmServer:
        self.launch()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def launch(self) -> None:
        """Start the process; `wait_ready` follows."""
        # vLLM leaves sockets and rendezvous files in TMPDIR; they are removed with this folder.
        self._folder = tempfile.TemporaryDirectory(prefix="disagg-vllm-")
        self.log = self.log or Path(self._folder.name) / "log"
        self.port = free_port()
        args = ["--model", str(self.model), "--served-model-name", "tiny"]
        args += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        args += ["--block-size", str(self.block_size)] if self.block_size else []
        args += ["--max-model-len", "16384"]
        args += ["--dtype", self.dtype, "--enable-prompt-tokens-details", *self.args]
        if self.transfer is not None:
            args += ["--kv-transfer-config", json.dumps(self.transfer)]
        if self.can_hold:
            args += ["--scheduler-cls", "disagg.testing.held_scheduler.HeldScheduler"]
            args += ["--additional-config", json.dumps({HOLD_OPTION: str(self.hold_file)})]
        env = {**os.environ, **CPU_ENV, "TMPDIR": self._folder.name, **self.env}
        self.process = self.start(args, env, self.log)

    def wait_ready(self) -> None:
        """Wait for /health. StartupError with the end of the log if the process ends before."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                raise StartupError(f"{self.name} ended while starting", self.tail())
            try:
                if client().get(f"{self.url}/health", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            time.sleep(0.5)
        raise StartupError(f"{self.name} was not ready after {START_S:.0f} s", self.tail())

    def stop(self) -> None:
        """End the process group: SIGTERM, then SIGKILL."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.resume()  # a stopped process does not handle SIGTERM
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
                self.process.wait(timeout=15)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        if self._folder is not None:
            self._folder.cleanup()

    def pause(self) -> None:
        """Stop its processes (SIGSTOP) until `resume`."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue its processes."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGCONT)

    @property
    def hold_file(self) -> Path:
        """Where `held_scheduler` looks."""
        assert self._folder is not None
        return Path(self._folder.name) / "hold"

    def worker(self) -> psutil.Process:
        """The process that holds the KV cache."""
        return self._child("Worker")

    def core(self) -> psutil.Process:
        """The process that schedules."""
        return self._child("EngineCore")

    def _child(self, word: str) -> psutil.Process:
        """The first with this word in its command line."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if word in " ".join(child.cmdline()))

    def tail(self, lines: int = 30) -> str:
        """The end of its log."""
        assert self.log is not None
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- its API ---------------------------------------------------------------------------

    def post(
        self,
        path: str,
        body: dict[str, Any],
        timeout: float = 180,
        headers: dict[str, str] | None = None,
    ) -> httpx.Response:
        """POST a JSON body."""
        body = {"model": "tiny", **body}
        return client().post(f"{self.url}{path}", json=body, timeout=timeout, headers=headers)

    def complete(self, prompt: Any, **options: Any) -> dict[str, Any]:
        """A greedy completion, by default of 16 tokens. RuntimeError unless the status is 200."""
        answer = self.post("/v1/completions", completion(prompt, **options))
        return _ok(answer)

    def prefill(
        self,
        prompt: Any,
        *,
        more: Mapping[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """The kv_transfer_params that the prefill leg answers. more: of those that it asks with."""
        body = completion(prompt, **options) | {"max_tokens": 1, "min_tokens": 0, "n": 1}
        body["kv_transfer_params"] = {**REMOTE_DECODE, **(more or {})}
        answer = self.post("/v1/completions", body, headers=headers)
        params: dict[str, Any] = _ok(answer)["kv_transfer_params"]
        return params

    def metrics(self, prefix: str = "disagg_") -> dict[str, float]:
        """Samples by `name{labels}`, without vLLM's own labels."""
        text = client().get(f"{self.url}/metrics", timeout=10).text
        # An engine has hundreds of other samples, and the parser is slow.
        lines = [line for line in text.splitlines(keepends=True) if line.startswith(prefix)]
        samples = {}
        for family in text_string_to_metric_families("".join(lines)):
            for sample in family.samples:
                labels = {
                    k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")
                }
                shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
                samples[f"{sample.name}{{{shown}}}"] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """One sample; 0 if there is none."""
        shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
        return self.metrics(name.split("_total")[0]).get(f"{name}{{{shown}}}", 0.0)


def _ok(answer: httpx.Response) -> dict[str, Any]:
    if answer.status_code != 200:
        raise RuntimeError(f"{answer.status_code}: {answer.text}")
    result: dict[str, Any] = answer.json()
    return result


def completion(prompt: Any, **options: Any) -> dict[str, Any]:
    """A body for /v1/completions: greedy, 16 tokens, with token ids in the answer."""
    return {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 16,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


def token_ids(answer: dict[str, Any]) -> list[list[int]]:
    """The token ids of every choice."""
    return [choice["token_ids"] for choice in answer["choices"]]
