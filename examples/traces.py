"""Shows each request as a waterfall: router, prefill, handoff, decode. A collector for a terminal.

    python examples/traces.py                       # listens on 127.0.0.1:4318

    OTEL_EXPORTER_OTLP_ENDPOINT=http://127.0.0.1:4318 \\
    disagg serve FILE \\
        --set engine.args.otlp_traces_endpoint=http://127.0.0.1:4318/v1/traces \\
        --set engine.env.OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf

Any OpenTelemetry collector takes its place: Jaeger, Tempo, an OpenTelemetry Collector. They listen
on the same port, and show the same spans.
"""

from __future__ import annotations

import argparse
import gzip
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

# Processes send their spans every five seconds; a trace is shown when nothing came for longer.
QUIET_S = 7.0
WIDTH = 40
OF_REQUESTS = {"prefill", "decode"}  # the router's spans of its legs
SHOWN = ("disagg.engine", "disagg.transport", "disagg.bytes", "disagg.outcome", "disagg.local")


class Traces:
    """The spans that have arrived, by trace."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: dict[bytes, list[Span]] = defaultdict(list)
        self._last: dict[bytes, float] = {}

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep what a process sent."""
        with self._lock:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self._spans[span.trace_id].append(span)
                        self._last[span.trace_id] = time.monotonic()

    def spans(self, trace: bytes) -> list[Span]:
        """What has arrived of one trace."""
        with self._lock:
            return list(self._spans.get(trace, ()))

    def take_whole(self) -> list[list[Span]]:
        """The requests' traces to which nothing was added for `QUIET_S`."""
        with self._lock:
            quiet = time.monotonic() - QUIET_S
            done = [trace for trace, last in self._last.items() if last < quiet]
            for trace in done:
                del self._last[trace]
            whole = [self._spans.pop(trace) for trace in done]
        # Starts of engines are traces too.
        return [spans for spans in whole if any(one.name in OF_REQUESTS for one in spans)]


def waterfall(spans: Sequence[Span]) -> str:
    """One line for each span, from its begin to its end."""
    begin = min(span.start_time_unix_nano for span in spans)
    length = max(1, max(span.end_time_unix_nano for span in spans) - begin)
    lines = []
    for span in sorted(spans, key=lambda s: (s.start_time_unix_nano, -s.end_time_unix_nano)):
        at, took = (
            span.start_time_unix_nano - begin,
            span.end_time_unix_nano - span.start_time_unix_nano,
        )
        left = min(WIDTH - 1, round(WIDTH * at / length))
        bar = " " * left + "█" * max(1, min(WIDTH - left, round(WIDTH * took / length)))
        fields = {field.key: field.value for field in span.attributes}
        more = [
            value.string_value or str(value.int_value)
            for key in SHOWN
            if (value := fields.get(key)) is not None
        ]
        lines.append(f"{span.name:<22} |{bar:<{WIDTH}}| {took / 1e6:9.1f} ms  {' '.join(more)}")
    return "\n".join([f"trace {spans[0].trace_id.hex()}", *lines, ""])


def collect(port: int, traces: Traces, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """A server that takes spans as OTLP over HTTP."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            traces.add(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Listen, and print traces until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=4318)
    parser.add_argument("--traces", type=int, default=0, help="end after so many; 0: never")
    options = parser.parse_args()
    traces, shown = Traces(), 0
    server = collect(options.port, traces)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"listening on http://127.0.0.1:{server.server_port}/v1/traces", flush=True)
    while options.traces == 0 or shown < options.traces:
        for spans in traces.take_whole():
            print(waterfall(spans), flush=True)
            shown += 1
        time.sleep(0.5)


if __name__ == "__main__":
    main()
