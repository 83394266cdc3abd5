"""Draws one request with and without streaming, from real traces: docs/images/streaming.svg.

    python -m examples.streaming docs/images/streaming.svg

Starts a prefill and a decode engine on the CPU, each on a network of its own, and a router beside
decode. The link between the networks carries the KV cache of the prompt in about the time that
prefill computes it in (or at `--link 400Mbit`). A router's first long prompt is not streamed, as no
prefill engine has invited it yet; its second one is. Needs root, for the networks.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

from disagg.bench.first_token.link import MODEL
from disagg.bench.first_token.link_engines import BLOCK, running
from disagg.bench.first_token.pairs import ours, random_prompt
from disagg.bench.timeline import Event, Span, Timeline, picture, timeline
from disagg.testing.checkpoint import make_model
from disagg.testing.http import client
from disagg.testing.launch import launch
from disagg.testing.network import Link, bits_per_s
from disagg.testing.openai_stream import stream
from disagg.testing.ports import free_port
from disagg.testing.vllm_server import completion
from examples.traces import Traces, collect

LAYERS, KV_HEADS, HEAD_DIM = 4, 8, 128
KV_BYTES_PER_TOKEN = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
TRACE_S = 60.0
WHOLE = {"/v1/completions", "llm_request", "handoff"}
"""The spans of a request; `llm_request` is there twice."""


class Scene:
    """The engines with a link between them, and whoever collects their traces."""

    def __init__(self, tokens: int, steps: int, stack: ExitStack) -> None:
        self.tokens, self._stack, self._random = tokens, stack, random.Random(1)
        make_model(MODEL, layers=LAYERS, hidden=512, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        self.link = stack.enter_context(Link())
        self._inside = self.link.networks[1].inside
        self._traces, self._port = Traces(), free_port()
        with self._inside():
            server = collect(self._port, self._traces, "0.0.0.0")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="disagg-")))
        pair = ours("tcp", folder)
        env = {**pair.env, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        args = ["--max-num-batched-tokens", str(tokens // steps), "--max-num-seqs", "16"]
        args += ["--host", "0.0.0.0", "--otlp-traces-endpoint", f"{self._collector}/v1/traces"]
        engines = running(replace(pair, env=env), MODEL, args, self.link)
        self._engines = stack.enter_context(engines)

    @property
    def _collector(self) -> str:
        return f"http://{self.link.addresses[1]}:{self._port}"

    def new_router(self) -> str:
        """A router that no engine has answered yet. Returns its URL, on decode's network."""
        prefill = f"http://{self.link.addresses[0]}:{self._engines.prefill.port}"
        command = [sys.executable, "-m", "disagg.cli", "router", "--port", "{port}"]
        command += ["--prefill", prefill, "--decode", self._engines.decode.url]
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": self._collector}
        with self._inside():
            url, _ = launch(self._stack, "router", command, env=env, is_ready=_is_ready)
        return url

    def ask(self, router: str, title: str) -> Timeline:
        """One request with a prompt that no engine knows, as its trace shows it."""
        prompt = random_prompt(self._random, self.tokens)
        trace = os.urandom(16)
        headers = {"traceparent": f"00-{trace.hex()}-{os.urandom(8).hex()}-01"}
        body = {"model": "tiny", **completion(prompt, max_tokens=8, stream=True)}
        with self._inside():
            for _ in stream(f"{router}/v1/completions", body, headers):
                pass
        return timeline([_span(one) for one in self._whole(trace)], title)

    def _whole(self, trace: bytes) -> Sequence[Sent]:
        """The spans of this trace, as soon as they are all here."""
        deadline = time.monotonic() + TRACE_S
        while True:
            spans = self._traces.spans(trace)
            names = [span.name for span in spans]
            if set(names) >= WHOLE and names.count("llm_request") == 2:
                time.sleep(6)  # a growing lease may be in the next batch
                return self._traces.spans(trace)
            if time.monotonic() > deadline:
                raise TimeoutError(f"the trace is not whole: {names}")
            time.sleep(0.2)


def _is_ready(url: str) -> bool:
    """Whether the router's engines are up, too."""
    try:
        return client().get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _span(sent: Sent) -> Span:
    events = [Event(one.name, one.time_unix_nano, _read(one.attributes)) for one in sent.events]
    begin, end = sent.start_time_unix_nano, sent.end_time_unix_nano
    return Span(sent.name, begin, end, _read(sent.attributes), events)


def _read(fields: Sequence[KeyValue]) -> dict[str, Any]:
    kinds: dict[str, Callable[[KeyValue], Any]] = {
        "string_value": lambda one: one.value.string_value,
        "int_value": lambda one: one.value.int_value,
        "double_value": lambda one: one.value.double_value,
    }
    found = [(one, one.value.WhichOneof("value")) for one in fields]
    return {one.key: kinds[kind](one) for one, kind in found if kind in kinds}


def main() -> None:
    """Start all, ask, and draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--tokens", type=int, default=8 * 4 * BLOCK)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--link", default="", help="bits per second, such as 400Mbit")
    options = parser.parse_args()
    size = options.tokens * KV_BYTES_PER_TOKEN
    with ExitStack() as stack:
        scene = Scene(options.tokens, options.steps, stack)
        warm = scene.new_router()
        for title in ("the first request", "the first that is streamed"):
            prefilled = scene.ask(warm, title)
            print(prefilled.text, flush=True)
        seconds = sum(bar.end - bar.begin for bar in prefilled.prefill)
        rate = bits_per_s(options.link) if options.link else round(size * 8 / seconds)
        scene.link.pace(rate)
        router = scene.new_router()
        drawn = [scene.ask(router, title) for title in ("Without streaming", "With streaming")]
    for one in drawn:
        print(one.text)
    if not drawn[1].hidden:
        raise SystemExit("the second request was not streamed")
    caption = (
        f"One prompt of {options.tokens:,} tokens, {size / 1e6:.0f} MB of KV in float32, over a "
        f"link of {rate / 1e6:.0f} Mbit/s. Measured {date.today()} on a CPU. Dashed: the prompt is "
        "computed."
    )
    title = "One request with and without streaming: prefill, the link, the first token"
    options.picture.write_text(picture(drawn, title, caption))


if __name__ == "__main__":
    main()
