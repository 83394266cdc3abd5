"""Measures a running engine for `disagg bench speeds`, over the engine's own HTTP API.

Any vLLM server with `/metrics` will do; it must be idle otherwise. Never starts or stops an engine.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from disagg.bench.speeds.fit import MoveSample, PromptSample, StepSample
from disagg.errors import StartupError
from disagg.router.api.bodies import PARAMS, REMOTE_DECODE
from disagg.testing.http import client
from disagg.testing.openai_stream import ANSWER_S, stream
from disagg.testing.vllm_server import completion

_PREFILL = "vllm:request_prefill_time_seconds"
_GAPS = "vllm:inter_token_latency_seconds"
_BYTES = "disagg_handoff_bytes_total"
_CACHE = "vllm:cache_config_info"
_COUNTED_S = 5.0
_PATH = "/v1/completions"
# In every vocabulary that `make-model` writes, and none of them special.
_TOKENS = range(300, 1000)


class Engine:
    """One engine by its URL. `role` is for error messages."""

    def __init__(self, role: str, url: str) -> None:
        self.role, self.url = role, url.rstrip("/")
        models = self._get("/v1/models").json()
        self.model: str = models["data"][0]["id"]
        self.root: str = models["data"][0].get("root") or self.model
        self.version: str = self._get("/version").json()["version"]

    def prompt(self, tokens: int, draw: random.Random) -> PromptSample:
        """A fresh prompt that this engine computes, without a handoff."""
        before = self._metric(_PREFILL)
        first_s = self._first_token(_fresh(tokens, draw), {})
        return PromptSample(tokens, self._counted(_PREFILL, before, 1), first_s)

    def prefill(self, tokens: int, draw: random.Random) -> tuple[PromptSample, Any, list[int]]:
        """The prefill leg of a fresh prompt: its times, the params for decode, the prompt."""
        prompt, before = _fresh(tokens, draw), self._metric(_PREFILL)
        began = time.monotonic()
        body = completion(prompt, max_tokens=1, min_tokens=0, **{PARAMS: REMOTE_DECODE})
        answer = self._post(body)
        client_s = time.monotonic() - began
        params = answer.get(PARAMS)
        if not params:
            raise StartupError(
                f"--{self.role}: {self.url}: its answer has no {PARAMS}; use DisaggConnector"
            )
        return PromptSample(tokens, self._counted(_PREFILL, before, 1), client_s), params, prompt

    def take_over(self, prompt: list[int], params: Any) -> tuple[MoveSample, float]:
        """The decode leg of a prompt that prefill computed, and the bytes fetched."""
        before = self._bytes()
        first_s = self._first_token(prompt, {PARAMS: params})
        # The engine counts bytes with the step after the load, as it does the first token.
        deadline = time.monotonic() + _COUNTED_S
        while (moved := self._bytes() - before) == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
        if moved == 0:
            raise StartupError(
                f"--{self.role}: {self.url} fetched nothing of a prompt of {len(prompt)} tokens "
                f"({_BYTES} did not grow); see its log for the reason"
            )
        return MoveSample(len(prompt), first_s), moved

    def steps(self, sequences: int, context: int, output: int, draw: random.Random) -> StepSample:
        """Decode steps of `sequences` sequences, all from one prompt of `context` tokens."""
        prompt = _fresh(context, draw)
        self._post(completion(prompt, max_tokens=1))  # into its prefix cache
        before = self._metric(_GAPS)
        # vLLM refuses several greedy answers to one prompt.
        self._post(completion(prompt, max_tokens=output, n=sequences, temperature=1.0))
        seconds = self._counted(_GAPS, before, sequences * (output - 1))
        return StepSample(sequences, sequences * (context + output / 2), seconds)

    def first_token_s(self, tokens: int, draw: random.Random) -> float:
        """Seconds to the first token of a fresh prompt."""
        return self._first_token(_fresh(tokens, draw), {})

    def kv_tokens(self) -> int:
        """Size of its KV cache, in tokens."""
        for labels, _ in self._samples(_CACHE):
            if (tokens := labels.get("kv_cache_size_tokens", "")).isdigit():
                return int(tokens)
        raise StartupError(f"--{self.role}: {self.url}/metrics: no kv_cache_size_tokens")

    # ---- its API ---------------------------------------------------------------------------

    def _first_token(self, prompt: list[int], extra: dict[str, Any]) -> float:
        began, first = time.monotonic(), 0.0
        for event in self._stream(completion(prompt, max_tokens=2, **extra)):
            if event.get("choices") and not first:
                first = time.monotonic()
        return first - began

    def _stream(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        asked = {"model": self.model, "stream": True, **body}
        try:
            yield from stream(f"{self.url}{_PATH}", asked)
        except (httpx.HTTPError, RuntimeError) as error:
            raise StartupError(f"--{self.role}: {self.url}: {error}") from error

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = client().post(
            f"{self.url}{_PATH}", json={"model": self.model, **body}, timeout=ANSWER_S
        )
        if answer.status_code != 200:
            raise StartupError(f"--{self.role}: {self.url}: {answer.status_code}: {answer.text}")
        content: dict[str, Any] = answer.json()
        return content

    def _get(self, path: str) -> httpx.Response:
        try:
            answer = client().get(f"{self.url}{path}", timeout=10)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StartupError(f"--{self.role}: {self.url}{path}: {error}") from error
        return answer

    def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        families = text_string_to_metric_families(self._get("/metrics").text)
        samples = itertools.chain.from_iterable(family.samples for family in families)
        return [(sample.labels, sample.value) for sample in samples if sample.name == name]

    def _sum(self, name: str) -> float:
        return sum(value for _, value in self._samples(name))

    def _bytes(self) -> float:
        return self._sum(_BYTES)

    def _metric(self, name: str) -> tuple[float, float]:
        """Sum and count of a histogram."""
        return self._sum(f"{name}_sum"), self._sum(f"{name}_count")

    def _counted(self, name: str, before: tuple[float, float], count: int) -> float:
        """The mean of the `count` times added since; the engine adds them after its answer."""
        deadline = time.monotonic() + _COUNTED_S
        while time.monotonic() < deadline:
            total, counted = self._metric(name)
            if counted == before[1] + count:
                return (total - before[0]) / count
            if counted > before[1] + count:
                raise StartupError(
                    f"--{self.role}: {self.url} serves other requests; it must be idle"
                )
            time.sleep(0.02)
        raise StartupError(
            f"--{self.role}: {self.url}/metrics: {name} did not grow by {count} in {_COUNTED_S:g} s"
        )


def _fresh(tokens: int, draw: random.Random) -> list[int]:
    return draw.choices(_TOKENS, k=tokens)
