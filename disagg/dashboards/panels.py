"""The dashboard's rows of panels, each with its PromQL.

Prometheus gets the same metrics from two sources: from the router's `/metrics` under their own
names, and from Ray's metrics endpoint as `ray_NAME`, with `_` for each `:`. The dashboard's
variable `via` holds the prefix of a source. So each query selects by a pattern of names, which
matches the name of one source. A panel uses only metrics that are emitted; a test compares.

In a Ray cluster with several deployments, the variable `deployment` selects some of them. The
router's own `/metrics` has no such label.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# The prefix of the router's names is `^`, the start of a pattern: Grafana accepts no empty value.
VIA = {"the router's /metrics": "^", "Ray's metrics endpoint": "ray_"}
_RANGE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One line of a graph, or one line for each set of labels that `legend` names."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph. unit: Grafana's name of a unit. width: columns, of 24."""

    title: str
    help: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    width: int = 8


def rows() -> Mapping[str, Sequence[Panel]]:
    """All panels, by the title of their row."""
    return {
        "Requests": _requests(),
        "Handoff": _handoff(),
        "Caches": _caches(),
        "Engines": _engines(),
        "Failures": _failures(),
    }


def _requests() -> list[Panel]:
    return [
        Panel(
            "Time to first byte (TTFT)",
            "From a request's arrival at the router to the first byte of its answer.",
            "s",
            _quantiles("disagg_router_ttft_seconds"),
        ),
        Panel(
            "Time between tokens (ITL)",
            "tokens: time between two tokens of an answer, at the engine. chunks: mean time "
            "between the chunks of an answer, at the router.",
            "s",
            [
                *_quantiles("vllm:inter_token_latency_seconds", what="tokens "),
                *_quantiles("disagg_router_between_chunks_seconds", (0.99,), what="chunks "),
            ],
        ),
        Panel(
            "Requests",
            "By the status that the client got. 499: the client disconnected.",
            "reqps",
            [_rates("disagg_router_requests_total", "status")],
            stacked=True,
        ),
        Panel(
            "In flight",
            "Requests that have a seat at an engine of this role.",
            "short",
            [_now("disagg_router_in_flight", "role")],
        ),
        Panel(
            "Queued at the router",
            "Requests that wait for a seat at an engine.",
            "short",
            [_now("disagg_router_queued", legend="queued")],
        ),
        Panel(
            "Tokens",
            "Prompt tokens and generated tokens, by engine. A prompt that was handed off counts "
            "at both engines.",
            "short",
            [
                _rates("vllm:prompt_tokens_total", "engine", legend="{{engine}} prompt/s"),
                _rates("vllm:generation_tokens_total", "engine", legend="{{engine}} generated/s"),
            ],
        ),
    ]


def _handoff() -> list[Panel]:
    moved, seconds = "disagg_handoff_bytes_total", "disagg_handoff_seconds"
    return [
        Panel(
            "Handoff on the decode engine",
            "From acquiring a lease to its release: connecting, moving blocks, checking them.",
            "s",
            _quantiles(seconds),
        ),
        Panel(
            "Legs at the router",
            "prefill: the prefill leg. then decode: from the prefill leg's end to the decode leg's "
            "first bytes.",
            "s",
            [
                *_quantiles("disagg_router_prefill_seconds", (0.5, 0.99), what="prefill "),
                *_quantiles("disagg_router_handoff_seconds", (0.5, 0.99), what="then decode "),
            ],
        ),
        Panel(
            "KV moved",
            "Bytes received per second, by transport.",
            "Bps",
            [_rates(moved, "transport")],
            stacked=True,
        ),
        Panel(
            "Speed of a handoff",
            "Bytes received per second of handoff time, by decode engine.",
            "Bps",
            [
                Query(
                    f"{_rate(moved, 'engine')} / {_rate(f'{seconds}_sum', 'engine')}",
                    "{{engine}}",
                )
            ],
        ),
        Panel(
            "KV hidden behind prefill",
            "Share of the bytes that came while prefill still computed the prompt, by decode "
            "engine. docs/streaming.md explains it.",
            "percentunit",
            [
                Query(
                    f"{_rate('disagg_handoff_hidden_bytes_total', 'engine')}"
                    f" / {_rate(moved, 'engine')}",
                    "{{engine}}",
                )
            ],
        ),
        Panel(
            "Both legs at once",
            "Requests whose decode leg could begin with their prefill leg, by what came of it. "
            "docs/streaming.md explains the outcomes.",
            "reqps",
            [_rates("disagg_router_followed_total", "outcome")],
            stacked=True,
        ),
        Panel(
            "Handoffs",
            "By outcome at the decode engine.",
            "ops",
            [_rates("disagg_handoffs_total", "transport", "outcome")],
            stacked=True,
        ),
        Panel(
            "Pairings",
            "Requests that were handed off, by their prefill and decode engine.",
            "reqps",
            [
                _rates(
                    "disagg_router_pairings_total",
                    "prefill",
                    "decode",
                    legend="{{prefill}} → {{decode}}",
                )
            ],
            stacked=True,
        ),
    ]


def _caches() -> list[Panel]:
    prompts = _rate("disagg_router_cache_prompt_tokens_total")
    return [
        Panel(
            "Prompt tokens from caches",
            "Share of the prompts' tokens that prefill engines need not compute. reported: as the "
            "engines say. expected: as their KV events told the router. With cache_aware only.",
            "percentunit",
            [
                Query(
                    f"{_rate(f'disagg_router_cache_{which}_tokens_total')} / {prompts}",
                    which,
                )
                for which in ("reported", "expected")
            ],
        ),
        Panel(
            "Fetched from other caches",
            "Tokens per second that an engine lacked and another engine's cache had under a lease. "
            "With share_caches only.",
            "short",
            [_rates("disagg_router_shared_tokens_total", legend="tokens/s")],
        ),
        Panel(
            "Engines asked for their caches",
            "By what came of it. docs/router.md explains the outcomes. With share_caches only.",
            "ops",
            [_rates("disagg_router_sources_total", "outcome")],
            stacked=True,
        ),
    ]


def _engines() -> list[Panel]:
    return [
        Panel(
            "Engines",
            "0: the engine does not answer or has a problem; the page /ui has the details.",
            "short",
            [_now("disagg_router_engine_up", "engine", function="min")],
            kind="stat",
            width=24,
        ),
        Panel(
            "KV cache in use",
            "Share of an engine's KV cache blocks that requests use.",
            "percentunit",
            [_now("vllm:kv_cache_usage_perc", "engine", function="max")],
        ),
        Panel(
            "Queues of the engines",
            "Requests that run on an engine, and requests that wait there.",
            "short",
            [
                _now("vllm:num_requests_waiting", "engine", legend="{{engine}} waiting"),
                _now("vllm:num_requests_running", "engine", legend="{{engine}} running"),
            ],
        ),
        Panel(
            "Leases held",
            "Prompts whose blocks a prefill engine keeps until a decode engine has fetched them.",
            "short",
            [_now("disagg_leases_held", "engine")],
        ),
    ]


def _failures() -> list[Panel]:
    return [
        Panel(
            "KV that did not arrive",
            "Loads of KV blocks that failed, so that decode computed the prompt. "
            "docs/connector.md explains the reasons.",
            "ops",
            [_rates("disagg_kv_load_failures_total", "reason")],
            stacked=True,
        ),
        Panel(
            "Prompts left to decode",
            "Requests that were not handed off, by reason. docs/router.md explains the reasons.",
            "reqps",
            [_rates("disagg_router_local_total", "reason")],
            stacked=True,
        ),
        Panel(
            "Errors, retries, moves",
            "Answers with status 500 and above, legs that were retried on another engine, streams "
            "whose engine died.",
            "ops",
            [
                _rates(
                    "disagg_router_requests_total",
                    "status",
                    where='status=~"5.."',
                    legend="status {{status}}",
                ),
                _rates("disagg_router_retries_total", "role", legend="{{role}} retried"),
                _rates("disagg_router_migrations_total", "outcome", legend="moved: {{outcome}}"),
            ],
        ),
        Panel(
            "Leases",
            "By outcome at the prefill engine.",
            "ops",
            [_rates("disagg_leases_total", "outcome")],
            stacked=True,
        ),
        Panel(
            "Waits for a seat",
            "Waiting time at the router of the requests that had to wait.",
            "s",
            _quantiles("disagg_router_queue_seconds", (0.5, 0.99)),
        ),
        Panel(
            "Engines at rest",
            "1 while an engine that keeps failing gets only trial requests.",
            "short",
            [_now("disagg_router_engine_resting", "engine", function="max")],
        ),
    ]


def _select(metric: str, where: str = "") -> str:
    pattern = metric.replace(":", "[:_]")
    asked = [f'__name__=~"${{via}}{pattern}"', 'deployment=~"$deployment"', *filter(None, [where])]
    return f"{{{', '.join(asked)}}}"


def _by(function: str, labels: Sequence[str], expr: str) -> str:
    return f"{function} by ({', '.join(labels)}) ({expr})" if labels else f"{function}({expr})"


def _rate(metric: str, *labels: str, where: str = "") -> str:
    return _by("sum", labels, f"rate({_select(metric, where)}[{_RANGE}])")


def _rates(metric: str, *labels: str, where: str = "", legend: str = "") -> Query:
    named = legend or " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(_rate(metric, *labels, where=where), named)


def _now(metric: str, *labels: str, function: str = "sum", legend: str = "") -> Query:
    named = legend or " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(_by(function, labels, _select(metric)), named)


def _quantiles(
    metric: str, quantiles: Sequence[float] = (0.5, 0.9, 0.99), *, what: str = ""
) -> list[Query]:
    buckets = _rate(f"{metric}_bucket", "le")
    return [
        Query(f"histogram_quantile({quantile:g}, {buckets})", f"{what}p{100 * quantile:g}")
        for quantile in quantiles
    ]
