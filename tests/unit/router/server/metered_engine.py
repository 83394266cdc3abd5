"""A fake engine that tells the metrics of a busy vLLM: it counts the requests that it gets.

It moves no KV cache: bytes and seconds of handoffs are made up, so many for each request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aiohttp import web
from unit.router.conftest import FakeEngine

BYTES, SECONDS = 25_000_000, 0.01  # of one handoff: 2.5 GB/s
HIDDEN = 15_000_000  # of these bytes, those that came while prefill computed
TOKENS = 20  # of one answer
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1)


@dataclass
class MeteredEngine(FakeEngine):
    """`kv_usage` and `running`: what it tells. `slowness`: of handoffs from now on. `forgotten`:
    requests before its last restart."""

    kv_usage: float = 0.4
    running: int = 2
    slowness: float = 1.0
    forgotten: int = 0
    moving_s: float = 0.0

    def restart(self) -> None:
        """Begin again with all counters."""
        self.forgotten, self.moving_s = len(self.bodies), 0.0

    def takes(self, body: dict[str, Any]) -> None:
        super().takes(body)  # in one go: its metrics may be read at any time
        self.moving_s += SECONDS * self.slowness

    async def _metrics(self, request: web.Request) -> web.Response:
        count = len(self.bodies) - self.forgotten
        tokens = count * (1 if self.role == "prefill" else TOKENS)
        gaps = count * (TOKENS - 1)
        of = 'engine="0",model_name="m"'
        lines = [
            f"vllm:num_requests_running{{{of}}} {self.running}",
            f"vllm:num_requests_waiting{{{of}}} 0",
            f"vllm:kv_cache_usage_perc{{{of}}} {self.kv_usage}",
            f"vllm:prompt_tokens_total{{{of}}} {150 * count}",
            f"vllm:generation_tokens_total{{{of}}} {tokens}",
            f'disagg_leases_held{{engine="0"}} {self.running if self.role == "prefill" else 0}',
        ]
        if self.role == "decode":
            name = "vllm:inter_token_latency_seconds_bucket"
            lines += [
                f'{name}{{{of},le="{bound}"}} {round(gaps * share)}'
                for bound, share in zip(BOUNDS, (0, 0.3, 0.9, 0.99, 1), strict=True)
            ]
            lines += [
                f'{name}{{{of},le="+Inf"}} {gaps}',
                f'disagg_handoffs_total{{engine="0",outcome="loaded",transport="tcp"}} {count}',
                f'disagg_handoff_bytes_total{{engine="0",transport="tcp"}} {count * BYTES}',
                f'disagg_handoff_hidden_bytes_total{{engine="0",transport="tcp"}} {count * HIDDEN}',
                f'disagg_handoff_seconds_sum{{engine="0"}} {self.moving_s}',
            ]
        return web.Response(text="\n".join(lines) + "\n")
